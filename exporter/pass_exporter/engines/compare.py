"""Compares the logits of engines with ONNX Runtime's by Polygraphy, in one pass of every plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pass_exporter.checks.widen import runnable_on_cpu
from pass_exporter.engines.profiles import engine_plans
from pass_runtime.backends.base import Backend, PassKind
from pass_runtime.backends.open import open_backend
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError

PROMPT_TOKENS = 40
RELATIVE_LIMITS = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""By the model's dtype, the largest accepted max |engine - ONNX Runtime| / max |logit|."""


@dataclass(frozen=True)
class Comparison:
    """The largest difference of a logit in a plan's pass. relative: `absolute` divided by the
    largest logit. limit: the largest value of `relative` that is accepted."""

    plan: str
    absolute: float
    relative: float
    limit: float


def compare_engines(bundle: Path, device: str) -> list[Comparison]:
    """Run the engines on `device` and ONNX Runtime on the CPU, and return a comparison for each
    plan. Raises PassError if a difference exceeds the limit."""
    from polygraphy.comparator import IterationResult, SimpleCompareFunc
    from polygraphy.logger import G_LOGGER

    manifest, comparisons = read_manifest(bundle), []
    limit = RELATIVE_LIMITS[manifest.model.dtype]
    with runnable_on_cpu(bundle, manifest) as runnable:
        expected = _logits(open_backend(bundle, runnable, "cpu"), manifest)
    actual = _logits(open_backend(bundle, manifest, device), manifest)
    for plan, reference in expected.items():
        largest_logit = float(np.abs(reference).max())
        compare = SimpleCompareFunc(check_error_stat="max", rtol=0.0, atol=limit * largest_logit)
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            results = [IterationResult({"logits": value}) for value in (actual[plan], reference)]
            outcome = compare(*results)["logits"]
        difference = float(outcome.max_absdiff)
        if not outcome:
            raise PassError(
                f"the {device} engines' logits differ from ONNX Runtime's by {difference:.2g} "
                f"(largest logit: {largest_logit:.2g}) in plan {plan}; CONTRIBUTING.md (Reducing a "
                "failing graph) shows how to find the layer"
            )
        comparisons.append(Comparison(plan, difference, difference / largest_logit, limit))
    return comparisons


def _logits(backend: Backend, manifest: Manifest) -> dict[str, npt.NDArray[np.float32]]:
    """Run a window of every plan after a random prompt, and close `backend`. Return the windows'
    logits [Q,V] by plan."""
    rng = np.random.default_rng(0)
    prompt = [int(token) for token in rng.integers(0, manifest.model.vocab_size, PROMPT_TOKENS)]
    try:
        return {plan.name: _pass(backend, plan, prompt) for plan in engine_plans(manifest)}
    finally:
        backend.close()


def _pass(backend: Backend, plan: Plan, prompt: list[int]) -> npt.NDArray[np.float32]:
    width = min(width for width in backend.capabilities.prefill_widths if width >= PROMPT_TOKENS)
    backend.resize(backend.capabilities.capacity(len(prompt) + max(width, plan.width)), [0])
    backend.set_sampling(0, SamplingParams())
    backend.prefill(0, 0, prompt, width)
    # The root and the drafts are the prompt's first tokens, once more: any tokens do.
    backend.stage(0, plan, len(prompt), prompt[0], prompt[1 : 1 + plan.depth])
    backend.run(PassKind(plan, 1, "greedy"))
    logits: npt.NDArray[np.float32] = backend.logits(plan)[0]
    return logits
