"""The exporter's own checks: the trunk against torch's results, and every decoding mode against plain decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pass_exporter.checks.cases import LARGE, Array, Case
from pass_exporter.checks.pieces import run_in_pieces
from pass_exporter.checks.rounded import given_feed, own_difference
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.bundle.manifest import Manifest, ModelInfo
from pass_runtime.bundle.plan import MODES
from pass_runtime.bundle.tensors import HIDDEN_OUTPUT, PAST, ROWS_INPUT, cache_names
from pass_runtime.errors import PassError
from pass_runtime.measuring.lossless import Difference, first_difference, run_tokens
from pass_runtime.options import GenerateOptions, LoadOptions
from pass_runtime.session import Session, open_session_of

LEAST_LIMIT = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}
ROUNDINGS = 16.0
"""The limit for float32 is that many times what as many roundings as a sum of the hidden size has, in every layer, come
to if they are independent. SmolLM2 has 0.3 of such a rounding unit, Qwen2.5-0.5B in int4 has 4.7."""

CODES_LIMIT = {"float32": 0.01, "float16": 0.3, "bfloat16": 0.5}
"""SmolLM2 has 0.0002, 0.04 and 0.24; a random model has 0.1 in float16. Rounding itself moves a value by 0.25."""
GREEDY_TOKENS = 32
FULL = ("full", "fp8")
"""Weights that ONNX Runtime's CPU kernels hold as float32."""
LARGE_TOKENS = 6


@dataclass(frozen=True)
class Limits:
    """error: the largest |onnx - torch| over the largest |torch| that is accepted, for logits and cache. codes: the
    largest mean difference between torch's codes of what a layer reads and the graph's own."""

    error: float
    codes: float


def limits_of(sizes: ModelInfo) -> Limits:
    """They hold for quantized weights too: torch has their codes' values, and ONNX Runtime multiplies in float32."""
    least, codes = LEAST_LIMIT[sizes.dtype], CODES_LIMIT[sizes.dtype]
    if sizes.dtype != "float32":
        return Limits(least, codes)
    several = ROUNDINGS * float(np.finfo(np.float32).eps) * math.sqrt(sizes.layers * sizes.hidden_size)
    return Limits(max(least, several), codes)


def check_trunk(bundle: Path, manifest: Manifest, cases: Sequence[Case], limits: Limits) -> float:
    """Run `cases` through the trunk and what was derived from it; returns the largest relative error.

    Raises PassError if a difference is beyond `limits`.
    """
    plain = [case for case in cases if not len(case.plan.lookahead_rows)]
    worst = _check_file(bundle / manifest.trunk.file, manifest, cases, limits, keeps=True)
    for derived in manifest.derived:
        # GroupQueryAttention, in trunks for one sequence, copies only what it reads where it cannot write in place.
        fitting, keeps = cases if derived.lookahead_rows else plain, derived.batch is None
        worst = max(worst, _check_file(bundle / derived.file, manifest, fitting, limits, keeps))
    return worst


def _check_file(file: Path, manifest: Manifest, cases: Sequence[Case], limits: Limits, keeps: bool) -> float:
    """keeps: whether the cache after the window keeps its values also where outputs have memory of their own."""
    worst = 0.0
    runs = run_in_pieces(file, [_feed(case, manifest) for case in cases])
    for case, outputs in zip(cases, runs, strict=True):
        error, codes = _relative_error(case, manifest, list(outputs.values()), keeps), own_difference(case, outputs)
        if not (error <= limits.error and codes <= limits.codes):
            of_codes = f", 8-bit codes by {codes:.2g} (limit {limits.codes:g})" if case.rounded else ""
            raise PassError(
                f"{file.name} differs from torch by {error:.2g} (limit {limits.error:g}){of_codes} on plan "
                f"{case.plan.name}; this model is not exported correctly, please report it"
            )
        worst = max(worst, error)
    return worst


def rows_expected(case: Case, manifest: Manifest) -> list[Array]:
    """The trunk's outputs before the cache: logits, and with a draft head the hidden rows that it reads."""
    with_hidden = any(tensor.name == HIDDEN_OUTPUT for tensor in manifest.trunk.outputs)
    return [case.logits, *([case.hidden[:, case.plan.lookahead_rows]] if with_hidden else [])]


def _feed(case: Case, manifest: Manifest) -> dict[str, Array]:
    feed: dict[str, Array] = {
        "input_ids": case.input_ids,
        "row_position": case.plan.row_position,
        "window_mask": case.plan.window_mask,
        "length": np.array([case.length]),
        "logit_rows": np.arange(case.plan.width),
    }
    if any(tensor.name == ROWS_INPUT for tensor in manifest.trunk.inputs):
        feed[ROWS_INPUT] = case.plan.lookahead_rows
    names = cache_names(PAST, manifest.model.layers)
    return feed | dict(zip(names, _caches(case), strict=True)) | given_feed(case)


def _caches(case: Case, spare: int = 24) -> list[Array]:
    """The cache before the pass. After `length` it holds the same random numbers every time: they must have no effect,
    and must not be overwritten beyond the window."""
    capacity, random = -(-(case.length + case.plan.width + spare) // 4) * 4, np.random.default_rng(1)
    caches = []
    for past in case.past:
        shape = (*past.shape[:2], capacity, past.shape[3])
        caches.append(random.standard_normal(shape, np.float32).astype(past.dtype))
        caches[-1][:, :, : case.length] = past
    return caches


def _relative_error(case: Case, manifest: Manifest, outputs: Sequence[Array], keeps: bool) -> float:
    rows = rows_expected(case, manifest)
    errors = [_error(found, expected) for found, expected in zip(outputs, rows, strict=False) if expected.size]
    for after, expected, window in zip(outputs[len(rows) :], _caches(case), case.window, strict=False):
        end = case.length + case.plan.width
        expected[:, :, case.length : end] = window
        errors.append(_error(after, expected) if keeps else _error(after[:, :, :end], expected[:, :, :end]))
    return max(errors)


def _error(actual: Array, expected: Array) -> float:
    difference = np.abs(actual.astype(np.float32) - expected.astype(np.float32)).max()
    return float(difference / max(np.abs(expected.astype(np.float32)).max(), 1e-6))


def check_greedy(bundle: Path, manifest: Manifest) -> tuple[int, Difference | None]:
    """Greedy text of every mode: the fewest tokens that agree with `ar`, and a near-tie if one parts from it there.

    0 tokens where `session_for_checks` finds no room.
    """
    session = session_for_checks(bundle, manifest)
    if session is None:
        return 0, None
    capacity = session.backend.capabilities.max_capacity
    prompt = session.encode("The quick brown fox jumps over")[: capacity // 2]
    count = min(LARGE_TOKENS if _is_large(bundle, manifest) else GREEDY_TOKENS, capacity - len(prompt))
    same, near_tie = count, None
    plain: list[int] = []
    # A tree's rows round elsewhere than plain decoding does, by more than a near-tie where activations have 8 bits.
    exact = session.backend.capabilities.exact_trees
    trees = [plan.name for plan in manifest.layouts if plan.parents and plan.drafts in exact]
    for plan in (*MODES, *trees[:1]):
        options = GenerateOptions(max_new_tokens=count, plan=plan, ignore_eos=True)
        tokens = run_tokens(session, prompt, options).token_ids
        plain = plain or tokens
        difference = first_difference(session, prompt, options, plain, tokens)
        if difference is not None and not difference.is_near_tie:
            raise PassError(f"{plan} decoding differs from plain decoding at {difference}; please report it")
        if difference is not None and difference.index < same:
            same, near_tie = difference.index, difference
    return same, near_tie


def session_for_checks(bundle: Path, manifest: Manifest) -> Session | None:
    """On the CPU; a large model's without fused kernels, which have copies of the weights.

    None where ONNX Runtime would have to hold a large model's weights widened to float32.
    """
    large = _is_large(bundle, manifest)
    if large and (manifest.model.dtype != "float32" or manifest.model.weights == "fp8"):
        return None
    backend = OrtBackend(bundle, manifest, "cpu", exact=True) if large else None
    return open_session_of(bundle, manifest, LoadOptions("cpu"), backend=backend)


def weight_bytes(bundle: Path) -> int:
    return max(file.stat().st_size for file in bundle.glob("trunk*.data"))


def _is_large(bundle: Path, manifest: Manifest) -> bool:
    return weight_bytes(bundle) > LARGE and manifest.model.weights in FULL
