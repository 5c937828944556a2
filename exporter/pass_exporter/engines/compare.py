"""Compares the engines' logits with ONNX Runtime's, in one pass of every window."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pass_exporter.checks.torch_cases import Array
from pass_exporter.checks.trunks import run_in_pieces, trunk_feed
from pass_exporter.engines.profiles import engine_windows
from pass_runtime.backends.base import Backend, Batch
from pass_runtime.backends.open import open_backend
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.tensors import PRESENT, cache_names
from pass_runtime.bundle.window import Window, prefill_window
from pass_runtime.errors import PassError
from pass_runtime.options import LoadOptions

PROMPT_TOKENS = 40
RELATIVE_LIMITS = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""The largest accepted max |engine - ONNX Runtime| / max |logit|."""


@dataclass(frozen=True)
class Comparison:
    """The largest difference of a logit in a window's pass. relative: to the largest logit."""

    window: str
    absolute: float
    relative: float
    limit: float


def compare_engines(bundle: Path, device: str) -> list[Comparison]:
    """Run the engines on `device` and ONNX Runtime on the CPU. Raises PassError if a difference
    exceeds the limit."""
    manifest, comparisons = read_manifest(bundle), []
    limit = RELATIVE_LIMITS[manifest.model.dtype]
    rng = np.random.default_rng(0)
    prompt = [int(token) for token in rng.integers(0, manifest.model.vocab_size, PROMPT_TOKENS)]
    expected = _expected(bundle, manifest, prompt)
    backend = open_backend(bundle, manifest, LoadOptions(device))
    try:
        actual = {each.name: _pass(backend, each, prompt) for each in engine_windows(manifest)}
    finally:
        backend.close()
    for window, reference in expected.items():
        largest_logit = float(np.abs(reference).max())
        difference = float(np.abs(actual[window] - reference).max())
        if not difference <= limit * largest_logit:  # written so that NaN fails
            raise PassError(
                f"the {device} engines' logits differ from ONNX Runtime's by {difference:.2g} "
                f"(largest logit: {largest_logit:.2g}) in window {window}; CONTRIBUTING.md "
                "(Reducing a failing graph) shows how to find the layer"
            )
        comparisons.append(Comparison(window, difference, difference / largest_logit, limit))
    return comparisons


def _expected(bundle: Path, manifest: Manifest, prompt: list[int]) -> dict[str, Array]:
    model, file = manifest.model, bundle / manifest.trunk.file
    dtype = "float32" if model.dtype == "bfloat16" else model.dtype
    empty = np.zeros((1, model.kv_heads, 0, model.head_dim), dtype)
    past: list[Array] = [empty] * (2 * model.layers)
    window, ids = prefill_window(PROMPT_TOKENS), np.array([prompt])
    (read,) = run_in_pieces(file, [trunk_feed(manifest, window, 0, ids, past)])
    past = [read[name][:, :, :PROMPT_TOKENS] for name in cache_names(PRESENT, model.layers)]
    windows, feeds = engine_windows(manifest), []
    for window in windows:
        # The root and the drafts are the prompt's first tokens, once more: any tokens do.
        ids = np.array([[*prompt[: 1 + window.drafts], *window.lookahead_ids(model.vocab_size)]])
        feeds.append(trunk_feed(manifest, window, PROMPT_TOKENS, ids, past))
    runs = run_in_pieces(file, feeds)
    return {window.name: run["logits"][0] for window, run in zip(windows, runs, strict=True)}


def _pass(backend: Backend, window: Window, prompt: list[int]) -> npt.NDArray[np.float32]:
    width = min(width for width in backend.capabilities.prefill_widths if width >= PROMPT_TOKENS)
    backend.resize(backend.capabilities.capacity(len(prompt) + max(width, window.width)), [0])
    backend.set_sampling(0, SamplingParams())
    backend.prefill(0, 0, prompt, width)
    backend.stage(0, window, len(prompt), prompt[0], prompt[1 : 1 + window.drafts])
    backend.run(Batch(window, 1, "greedy"))
    logits: npt.NDArray[np.float32] = backend.logits(window)[0]
    return logits
