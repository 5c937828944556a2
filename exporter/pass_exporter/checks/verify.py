"""The exporter's own checks: the trunk against torch, and every mode against plain decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pass_exporter.checks.cases import LARGE_MODEL_BYTES, Array, Case
from pass_exporter.checks.pieces import run_in_pieces
from pass_exporter.checks.rounded import codes_difference, torch_codes_feed
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.bundle.manifest import Manifest, ModelInfo
from pass_runtime.bundle.plan import MODES
from pass_runtime.bundle.tensors import HIDDEN_OUTPUT, LOOKAHEAD_ROWS, PAST, cache_names
from pass_runtime.errors import PassError
from pass_runtime.measuring.lossless import Difference, first_difference, run_tokens
from pass_runtime.options import GenerateOptions, LoadOptions
from pass_runtime.session import Session, load_verified

MIN_ERROR_LIMIT = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}
"""By dtype, the least value of `Limits.error`. Only float32's limit grows with the model."""
ROUNDING_FACTOR = 16.0
"""The error limit for float32 is this times the expected error: eps * sqrt(layers * hidden size),
if each layer sums hidden-size terms with independent roundings. SmolLM2 has 0.3 times that error,
Qwen2.5-0.5B in int4 4.7 times."""

CODES_LIMIT = {"float32": 0.01, "float16": 0.3, "bfloat16": 0.5}
"""By dtype, the largest accepted mean difference in codes. SmolLM2 has 0.0002, 0.04 and 0.24, a
random model 0.1 in float16. Rounding itself moves values by 0.25 codes on average."""
GREEDY_TOKENS, LARGE_MODEL_GREEDY_TOKENS = 32, 6
WIDENED_FORMATS = ("full", "fp8")
"""Weight formats that ONNX Runtime's CPU kernels hold as float32."""


@dataclass(frozen=True)
class Limits:
    """The largest accepted differences.

    error: max |onnx - torch| / max |torch|, for logits and cache.
    codes: the mean difference between torch's codes of a layer's input and the graph's own.
    """

    error: float
    codes: float


def limits_of(sizes: ModelInfo) -> Limits:
    """Return the limits for a model. They hold for quantized weights too, because torch's weights
    have the values of the codes, and ONNX Runtime multiplies in float32."""
    least, codes = MIN_ERROR_LIMIT[sizes.dtype], CODES_LIMIT[sizes.dtype]
    if sizes.dtype != "float32":
        return Limits(least, codes)
    scaled = (
        ROUNDING_FACTOR
        * float(np.finfo(np.float32).eps)
        * math.sqrt(sizes.layers * sizes.hidden_size)
    )
    return Limits(max(least, scaled), codes)


def check_trunk(bundle: Path, manifest: Manifest, cases: Sequence[Case], limits: Limits) -> float:
    """Run `cases` through the trunk and the trunks derived from it. Return the largest error.

    Raises PassError if a difference exceeds `limits`.
    """
    plain = [case for case in cases if not len(case.plan.lookahead_rows)]
    worst = _check_file(bundle / manifest.trunk.file, manifest, cases, limits, keeps=True)
    for derived in manifest.derived:
        fitting = cases if derived.lookahead_rows else plain
        # Trunks for one sequence have GroupQueryAttention, which may copy only the entries up to
        # the window's end.
        worst = max(
            worst,
            _check_file(
                bundle / derived.file, manifest, fitting, limits, keeps=derived.batch is None
            ),
        )
    return worst


def _check_file(
    file: Path, manifest: Manifest, cases: Sequence[Case], limits: Limits, keeps: bool
) -> float:
    """Check one trunk. keeps: whether it copies cache entries after the window to its outputs."""
    runs = run_in_pieces(
        file, [trunk_feed(case, manifest) | torch_codes_feed(case) for case in cases]
    )
    by_case = list(zip(cases, runs, strict=True))
    errors = [
        (_relative_error(case, manifest, [*outs.values()], keeps), case.plan.name)
        for case, outs in by_case
    ]
    codes = codes_difference(by_case)
    error, plan = max(errors, key=lambda each: np.nan_to_num(each[0], nan=np.inf))
    if not (error <= limits.error and codes <= limits.codes):
        of_codes = (
            f", 8-bit codes by {codes:.2g} (limit {limits.codes:g})" if cases[0].rounded else ""
        )
        raise PassError(
            f"{file.name} differs from torch by {error:.2g} (limit {limits.error:g}) on plan "
            f"{plan}{of_codes}; this model is not exported correctly, please report it"
        )
    return error


def rows_expected(case: Case, manifest: Manifest) -> list[Array]:
    """Return the expected outputs before the cache's: logits and, for a draft head, hidden rows."""
    with_hidden = any(tensor.name == HIDDEN_OUTPUT for tensor in manifest.trunk.outputs)
    return [case.logits, *([case.hidden[:, case.plan.lookahead_rows]] if with_hidden else [])]


def trunk_feed(case: Case, manifest: Manifest) -> dict[str, Array]:
    """Return the inputs of the trunk for the pass of a case."""
    feed: dict[str, Array] = {
        "input_ids": case.input_ids,
        "row_position": case.plan.row_position,
        "window_mask": case.plan.window_mask,
        "length": np.array([case.length]),
        "logit_rows": np.arange(case.plan.width),
    }
    if any(tensor.name == LOOKAHEAD_ROWS for tensor in manifest.trunk.inputs):
        feed[LOOKAHEAD_ROWS] = case.plan.lookahead_rows
    names = cache_names(PAST, manifest.model.layers)
    return feed | dict(zip(names, _caches(case), strict=True))


def _caches(case: Case, spare: int = 24) -> list[Array]:
    """Return the cache before the pass, with `spare` or more entries after the window.

    The entries from `length` on are random, the same on every call: they must not change the
    results, and the pass must not overwrite them beyond the window.
    """
    capacity = -(-(case.length + case.plan.width + spare) // 4) * 4
    random = np.random.default_rng(1)
    caches = []
    for past in case.past:
        shape = (*past.shape[:2], capacity, past.shape[3])
        caches.append(random.standard_normal(shape, np.float32).astype(past.dtype))
        caches[-1][:, :, : case.length] = past
    return caches


def _relative_error(case: Case, manifest: Manifest, outputs: Sequence[Array], keeps: bool) -> float:
    rows = rows_expected(case, manifest)
    errors = [
        _error(found, expected)
        for found, expected in zip(outputs, rows, strict=False)
        if expected.size
    ]
    for after, expected, window in zip(
        outputs[len(rows) :], _caches(case), case.window, strict=False
    ):
        end = case.length + case.plan.width
        expected[:, :, case.length : end] = window
        errors.append(
            _error(after, expected) if keeps else _error(after[:, :, :end], expected[:, :, :end])
        )
    return max(errors)


def _error(actual: Array, expected: Array) -> float:
    difference = np.abs(actual.astype(np.float32) - expected.astype(np.float32)).max()
    return float(difference / max(np.abs(expected.astype(np.float32)).max(), 1e-6))


def check_greedy(bundle: Path, manifest: Manifest) -> tuple[int, Difference | None]:
    """Compare the greedy text of every mode and of one tree with that of `ar`.

    Return the number of tokens on which all agree, and the near-tie after them if there is one; 0
    tokens if `session_for_checks` returns None. Raises PassError if a text differs at a token that
    is no near-tie.
    """
    session = session_for_checks(bundle, manifest)
    if session is None:
        return 0, None
    capacity = session.backend.capabilities.max_capacity
    prompt = session.encode("The quick brown fox jumps over")[: capacity // 2]
    count = min(
        LARGE_MODEL_GREEDY_TOKENS if _is_large(bundle, manifest) else GREEDY_TOKENS,
        capacity - len(prompt),
    )
    same, near_tie = count, None
    plain: list[int] = []
    # With 8-bit activations, a tree's text may differ by more than a near-tie: no tree is in
    # `exact_trees` then.
    exact = session.backend.capabilities.exact_trees
    trees = [plan.name for plan in manifest.layouts if plan.parents and plan.drafts in exact]
    for plan in (*MODES, *trees[:1]):
        options = GenerateOptions(max_new_tokens=count, plan=plan, ignore_eos=True)
        tokens = run_tokens(session, prompt, options).token_ids
        plain = plain or tokens
        difference = first_difference(session, prompt, options, plain, tokens)
        if difference is not None and not difference.is_near_tie:
            raise PassError(
                f"{plan} decoding differs from plain decoding at {difference}; please report it"
            )
        if difference is not None and difference.index < same:
            same, near_tie = difference.index, difference
    return same, near_tie


def session_for_checks(bundle: Path, manifest: Manifest) -> Session | None:
    """Open a session on the CPU. A large model runs without fused kernels, which copy the weights.

    Return None if ONNX Runtime would have to hold a large model's weights widened to float32.
    """
    large = _is_large(bundle, manifest)
    if large and (manifest.model.dtype != "float32" or manifest.model.weights == "fp8"):
        return None
    backend = OrtBackend(bundle, manifest, "cpu", exact=True) if large else None
    return load_verified(bundle, manifest, LoadOptions("cpu"), backend=backend)


def weight_bytes(bundle: Path) -> int:
    """Return the size of the largest weights file of the bundle's trunks."""
    return max(file.stat().st_size for file in bundle.glob("trunk*.data"))


def _is_large(bundle: Path, manifest: Manifest) -> bool:
    """Whether the weights are large, and ONNX Runtime's kernels hold them as float32."""
    return weight_bytes(bundle) > LARGE_MODEL_BYTES and manifest.model.weights in WIDENED_FORMATS
