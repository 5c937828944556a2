"""Checks a written bundle: its trunks against torch, and every mode against plain decoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pass_exporter.checks.cases import LARGE_MODEL_BYTES, Array, Case
from pass_exporter.checks.pieces import run_in_pieces
from pass_runtime.backends.ort.backend import ROUNDED_WEIGHTS, OrtBackend
from pass_runtime.backends.ort.kernels import HOW_TO_GET, Kernels, library
from pass_runtime.backends.ort.trunks import cpu_kernels
from pass_runtime.bundle.manifest import Manifest, ModelInfo
from pass_runtime.bundle.plan import MODES
from pass_runtime.bundle.tensors import HIDDEN_OUTPUT, LOOKAHEAD_ROWS, PAST, cache_names
from pass_runtime.errors import PassError
from pass_runtime.measuring.lossless import Difference, first_difference, run_tokens
from pass_runtime.options import GenerateOptions, LoadOptions
from pass_runtime.session import Session, load_verified

MIN_ERROR_LIMIT = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}
"""By dtype, the smallest value of `Limits.error`. Only float32's limit grows with the model."""
ROUNDING_FACTOR = 16.0
"""The error limit for float32 is this many times the expected error, eps * sqrt(layers * hidden
size), which assumes that each layer sums hidden-size terms whose roundings are independent. SmolLM2
has 0.3 times the expected error, Qwen2.5-0.5B in int4 4.7 times."""
ROUNDED_LIMIT = 0.25
"""The value of `Limits.rounded` for weights of 4 or 8 bits. Tiny random models of all families have
up to 0.1, with wrong masks or positions 0.7 or more."""
GREEDY_TOKENS, LARGE_MODEL_GREEDY_TOKENS, SPARE_ENTRIES = 32, 6, 24
"""The numbers of tokens that `check_greedy` compares, and of unused entries that `_caches` adds."""
WIDENED_FORMATS = ("full", "fp8")
"""Weight formats that ONNX Runtime's CPU kernels hold as float32."""


@dataclass(frozen=True)
class Limits:
    """The largest accepted differences between a trunk's results and torch's: max |onnx - torch| /
    max |torch|, for logits and KV cache.

    error: that of a trunk. rounded: that of the trunk for CPUs, which rounds the rows that it
    multiplies with codes to 8 bits.
    """

    error: float
    rounded: float


def limits_of(sizes: ModelInfo) -> Limits:
    """Return the limits for a model. They hold for quantized weights too, because torch's weights
    have the values of the codes."""
    error = MIN_ERROR_LIMIT[sizes.dtype]
    if sizes.dtype == "float32":
        roundings = math.sqrt(sizes.layers * sizes.hidden_size)
        error = max(error, ROUNDING_FACTOR * float(np.finfo(np.float32).eps) * roundings)
    return Limits(error, ROUNDED_LIMIT if sizes.weights in ROUNDED_WEIGHTS else error)


def check_trunk(
    bundle: Path, manifest: Manifest, cases: Sequence[Case], limits: Limits
) -> tuple[float, float]:
    """Run `cases` through the trunk and the trunks derived from it that can run here. Return the
    error that is the largest relative to its limit, and that limit.

    Raises PassError if a difference exceeds `limits`, or if no trunk can run here.
    """
    without_rows = [case for case in cases if not len(case.plan.lookahead_rows)]
    errors: list[tuple[float, float]] = []
    if (bundle / manifest.trunk.file).exists():
        file, limit = bundle / manifest.trunk.file, limits.error
        errors.append((_check_file(file, manifest, cases, limit), limit))
    for derived in manifest.derived:
        on_cpu = derived.device == "cpu"
        if on_cpu and library() is None:
            continue
        fitting = cases if derived.lookahead_rows else without_rows
        file, limit = bundle / derived.file, limits.rounded if on_cpu else limits.error
        # Trunks for one sequence have GroupQueryAttention, which may copy only the entries up to
        # the window's end into the new cache.
        all_entries = derived.batch is None
        error = _check_file(file, manifest, fitting, limit, all_entries=all_entries)
        errors.append((error, limit))
    if not errors:
        raise PassError(f"a bundle for CPUs alone cannot be checked without kernels: {HOW_TO_GET}")
    return max(errors, key=lambda each: each[0] / each[1])


def _check_file(
    file: Path,
    manifest: Manifest,
    cases: Sequence[Case],
    limit: float,
    *,
    all_entries: bool = True,
) -> float:
    """Check one trunk. Return the largest error of all cases. all_entries: whether the entries
    after the window in the new cache are compared too."""
    runs = run_in_pieces(file, [trunk_feed(case, manifest) for case in cases])
    errors = [
        _relative_error(case, manifest, [*run.values()], all_entries)
        for case, run in zip(cases, runs, strict=True)
    ]
    worst = int(np.argmax(errors))  # the first NaN if there is one
    error, plan = errors[worst], cases[worst].plan.name
    if not error <= limit:  # written so that NaN fails
        raise PassError(
            f"{file.name} differs from torch by {error:.2g} (limit {limit:g}) on plan {plan}; this "
            "model is not exported correctly, please report it"
        )
    return error


def rows_expected(case: Case, manifest: Manifest) -> list[Array]:
    """Return the expected values of the trunk's outputs that precede the cache: the logits and, if
    there is a draft head, the hidden states of the look-ahead rows."""
    with_hidden = any(tensor.name == HIDDEN_OUTPUT for tensor in manifest.trunk.outputs)
    return [case.logits, *([case.hidden[:, case.plan.lookahead_rows]] if with_hidden else [])]


def trunk_feed(case: Case, manifest: Manifest) -> dict[str, Array]:
    """Return the inputs of the trunk, by name, for the pass of a case."""
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


def _caches(case: Case) -> list[Array]:
    """Return the cache before the pass, with room for the window and SPARE_ENTRIES or more entries.

    The entries after the text are random, the same in every call: they must not change the results,
    and the pass must not overwrite those after the window.
    """
    # All KV capacities are multiples of 4, because TensorRT needs them to be.
    capacity = -(-(case.length + case.plan.width + SPARE_ENTRIES) // 4) * 4
    random = np.random.default_rng(1)
    caches = []
    for past in case.past:
        shape = (*past.shape[:2], capacity, past.shape[3])
        cache = random.standard_normal(shape, np.float32).astype(past.dtype)
        cache[:, :, : case.length] = past
        caches.append(cache)
    return caches


def _relative_error(
    case: Case, manifest: Manifest, outputs: Sequence[Array], all_entries: bool
) -> float:
    """Return the largest `_error` of a trunk's `outputs`, in the graph's order, for `case`."""
    rows = rows_expected(case, manifest)
    errors = [
        _error(output, expected)
        for output, expected in zip(outputs, rows, strict=False)  # the cache follows
        if expected.size
    ]
    window_end = case.length + case.plan.width
    compared = slice(None if all_entries else window_end)
    for after, expected, window in zip(
        outputs[len(rows) :], _caches(case), case.window, strict=True
    ):
        expected[:, :, case.length : window_end] = window
        errors.append(_error(after[:, :, compared], expected[:, :, compared]))
    return float(np.max(errors))  # NaN if an error is, unlike Python's `max`


def _error(actual: Array, expected: Array) -> float:
    difference = np.abs(actual.astype(np.float32) - expected.astype(np.float32)).max()
    return float(difference / max(np.abs(expected.astype(np.float32)).max(), 1e-6))


def check_greedy(bundle: Path, manifest: Manifest) -> tuple[int, Difference | None]:
    """Compare the greedy text of every mode, and of one tree, with that of plain decoding.

    Return the number of tokens on which all texts agree, and the near-tie at which a text differs
    from there on, or None; (0, None) if the bundle cannot run here (`session_for_checks` returns
    None). Raises PassError if a text differs at a token that is no near-tie.
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
    agreed, near_tie = count, None
    plain: list[int] = []
    # With 8-bit activations, a tree's text may differ by more than a near-tie: no tree is in
    # `exact_trees` then.
    exact = session.backend.capabilities.exact_trees
    trees = [plan.name for plan in manifest.layouts if plan.parents and plan.drafts in exact]
    for mode in (*MODES, *trees[:1]):
        options = GenerateOptions(max_new_tokens=count, plan=mode, ignore_eos=True)
        tokens = run_tokens(session, prompt, options).token_ids
        plain = plain or tokens  # The first of MODES is "ar".
        difference = first_difference(session, prompt, options, plain, tokens)
        if difference is not None and not difference.is_near_tie:
            raise PassError(
                f"{mode} decoding differs from plain decoding at {difference}; please report it"
            )
        if difference is not None and difference.index < agreed:
            agreed, near_tie = difference.index, difference
    return agreed, near_tie


def session_for_checks(bundle: Path, manifest: Manifest) -> Session | None:
    """Open a session on the CPU, for a large model without the copies of weights that ONNX
    Runtime's own kernels make. Return None if they would have to be widened to float32."""
    large = _is_large(bundle, manifest) and not runs_own_kernels(manifest)
    if large and (manifest.model.dtype != "float32" or manifest.model.weights == "fp8"):
        return None
    backend = OrtBackend(bundle, manifest, "cpu", exact=True) if large else None
    return load_verified(bundle, manifest, LoadOptions("cpu"), backend=backend)


def runs_own_kernels(manifest: Manifest) -> bool:
    """Whether the toolkit's own kernels run the bundle here. They copy no weights."""
    return isinstance(cpu_kernels(manifest, "cpu"), Kernels)


def weight_bytes(bundle: Path) -> int:
    """Return the size of the largest weights file of the bundle's trunks."""
    return max(file.stat().st_size for file in bundle.glob("trunk*.data"))


def _is_large(bundle: Path, manifest: Manifest) -> bool:
    """Whether ONNX Runtime's copies of the weights in float32 may not fit into memory."""
    return weight_bytes(bundle) > LARGE_MODEL_BYTES and manifest.model.weights in WIDENED_FORMATS
