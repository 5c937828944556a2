"""Opens a finished bundle as its users do, and compares the text of every plan with that of plain
decoding."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from pass_exporter.checks.perplexity import Quality, TextScores, measure_quality
from pass_exporter.checks.torch_cases import LARGE_MODEL_BYTES
from pass_runtime.backends.ort.session import Kernels, cpu_kernels
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import PLAN_NAMES
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_runtime.measuring.lossless import Difference, first_difference, run_tokens
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session, load

GREEDY_TOKENS, LARGE_MODEL_GREEDY_TOKENS = 32, 6
PROMPT = "The quick brown fox jumps over"
RUNTIME_ADVICE = re.compile("[;:] (copy or )?export the bundle again$")
"""The end of some messages of the runtime: another export would write the same bundle."""


@dataclass(frozen=True)
class Decoding:
    """greedy_tokens: on how many all plans agree, None if the bundle did not run. near_tie: where a
    text differs from there on."""

    greedy_tokens: int | None
    near_tie: Difference | None = None
    quality: Quality | None = None


def check_decoding(bundle: Path, scores: TextScores | None, max_ratio: float) -> Decoding:
    """Decode with a bundle, and measure its perplexity on the text of `scores`.

    Only the files are checked if ONNX Runtime cannot run them, or would have to widen many weights
    to float32. Raises PassError if a text differs at a token that is no near-tie, or if the
    perplexity is more than `max_ratio` times the full-precision model's.
    """
    try:
        manifest = read_manifest(bundle)
        verify_files(bundle, manifest)
        is_large = _is_large(bundle, manifest)
        if manifest.model.dtype == "bfloat16" or (
            is_large and scores is None and not isinstance(cpu_kernels(manifest, "cpu"), Kernels)
        ):
            return Decoding(None)
        session = load(bundle, "cpu", verify=False)
    except PassError as error:
        reason = RUNTIME_ADVICE.sub("", str(error))
        raise PassError(
            f"the runtime refuses the bundle that this export wrote, please report it: {reason}"
        ) from None
    with session:
        tokens = LARGE_MODEL_GREEDY_TOKENS if is_large else GREEDY_TOKENS
        agreed, near_tie = _compare_plans(session, tokens)
        quality = None if scores is None else measure_quality(session, scores)
    if quality is not None:
        quality.check(max_ratio)
    return Decoding(agreed, near_tie, quality)


def _compare_plans(session: Session, tokens: int) -> tuple[int, Difference | None]:
    # It repeats itself, so that drafts are copied.
    prompt = (session.encode(PROMPT) * 2)[: session.capacity // 2]
    count = min(tokens, session.capacity - len(prompt))
    agreed, near_tie, plain = count, None, list[int]()
    requests = [GenerateOptions(count, plan=plan, ignore_eos=True) for plan in PLAN_NAMES]
    for options in (*requests, replace(requests[-1], draft="both")):
        written = run_tokens(session, prompt, options).token_ids
        plain = plain or written  # The first of PLAN_NAMES is "ar".
        difference = first_difference(session, prompt, options, plain, written)
        if difference is not None and not difference.is_near_tie:
            raise PassError(
                f"{options.plan} decoding differs from plain decoding at {difference}; please "
                "report it"
            )
        if difference is not None and difference.index < agreed:
            agreed, near_tie = difference.index, difference
    return agreed, near_tie


def _is_large(bundle: Path, manifest: Manifest) -> bool:
    weights = max(file.stat().st_size for file in bundle.glob("trunk*.data"))
    return weights > LARGE_MODEL_BYTES and manifest.model.weights in ("full", "fp8")
