"""The exporter's own checks: the trunk against torch, and every decoding mode against plain decoding.

The torch side runs transformers' unpatched model, before the trunk is written; the ONNX side runs the written
files afterwards, when torch's copy of the weights is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch
from transformers import DynamicCache, PreTrainedModel

from pass_exporter.model.lookahead import Lookahead
from pass_exporter.trunk.trace import ADAPTER_INPUT, Trunk, kv_names
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import MODES, Plan, bundle_plans, prefill_plan
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions, LoadOptions
from pass_runtime.session import open_session_of
from pass_runtime.testing.lossless import Difference, first_difference, run_tokens

RELATIVE_ERROR_LIMIT = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest |onnx - torch| over the largest |torch|, for logits and cache, by dtype.

Quantized weights change nothing here: torch's are what the grid kept, and ONNX Runtime multiplies in float32."""

GREEDY_TOKENS = 32

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One window after `length` committed tokens, and what torch made of it.

    past, window: per layer and part (keys first), [1,KVH,length,D] and [1,KVH,Q,D]. logits: [1,Q,V].
    """

    plan: Plan
    length: int
    input_ids: Array
    past: list[Array]
    window: list[Array]
    logits: Array


def torch_cases(model: PreTrainedModel, lookahead: Lookahead, seed: int = 0) -> list[Case]:
    """A random window of every plan of the bundle, and one of prefill."""
    rng = np.random.default_rng(seed)
    return [_torch_case(model, lookahead, plan, rng) for plan in (*bundle_plans(lookahead.length), prefill_plan(16))]


@torch.no_grad()
def _torch_case(model: PreTrainedModel, lookahead: Lookahead, plan: Plan, rng: np.random.Generator) -> Case:
    trunk, vocab = Trunk(model, lookahead), model.config.vocab_size
    length = int(rng.integers(3, 40))
    cache = DynamicCache()
    prefix = torch.from_numpy(rng.integers(0, vocab, (1, length)))
    model.model(input_ids=prefix, past_key_values=cache, use_cache=True)
    past = _entries(cache, slice(0, length))
    tokens = rng.integers(0, vocab, plan.width - sum(plan.groups))
    input_ids = np.concatenate([tokens, plan.lookahead_ids(vocab)])[None].astype(np.int64)
    committed = np.ones((plan.width, length), np.bool_)
    with _adapted(model, lookahead, torch.from_numpy(input_ids[0] >= vocab)):
        hidden = model.model(
            inputs_embeds=trunk.embed(torch.from_numpy(input_ids)),
            attention_mask=torch.from_numpy(np.concatenate([committed, plan.window_mask], 1))[None, None],
            position_ids=torch.from_numpy(length + plan.row_position)[None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    logits = model.lm_head(hidden).float().numpy()
    return Case(plan, length, input_ids, past, _entries(cache, slice(length, None)), logits)


def _adapted(model: PreTrainedModel, lookahead: Lookahead, is_lookahead: torch.Tensor) -> AbstractContextManager[None]:
    """The adapter where `is_lookahead` [Q], computed for every row and masked: not the way the trunk does it."""
    adapter = lookahead.adapter
    if adapter is None:
        return nullcontext()
    return adapter.attached(model, lambda y, x, i: torch.where(is_lookahead[:, None], y + adapter.delta(i, x), y))


def _entries(cache: DynamicCache, columns: slice) -> list[Array]:
    """Copies of the cache's columns: every layer's keys, then every layer's values."""
    parts = [getattr(layer, part)[:, :, columns] for part in ("keys", "values") for layer in cache.layers]
    # numpy has no bf16; float32 holds all of it
    return [(part.float() if part.dtype == torch.bfloat16 else part).numpy().copy() for part in parts]


def check_trunk(bundle: Path, manifest: Manifest, cases: Sequence[Case], limit: float) -> float:
    """Run `cases` through the trunk and what was derived from it; returns the largest relative error, raises PassError
    beyond `limit`."""
    files = [manifest.trunk.file, *(derived.file for derived in manifest.derived)]
    return max(_check_file(bundle / file, manifest, cases, limit) for file in files)


def _check_file(file: Path, manifest: Manifest, cases: Sequence[Case], limit: float) -> float:
    session = open_session(file, "cpu", exact=True)
    worst = 0.0
    for case in cases:
        error = _relative_error(session, case, manifest.model.layers)
        if not error <= limit:
            raise PassError(
                f"{file.name} differs from torch by {error:.2g} (limit {limit:g}) on plan {case.plan.name}; "
                "this model is not exported correctly, please report it"
            )
        worst = max(worst, error)
    return worst


def _relative_error(session: ort.InferenceSession, case: Case, layers: int) -> float:
    logits, *present = run_case(session, case, layers)
    errors = [_error(logits, case.logits)]
    for cache, junk, past, window in zip(present, _junk(case, layers).values(), case.past, case.window, strict=True):
        expected = junk.copy()
        expected[:, :, : case.length] = past
        expected[:, :, case.length : case.length + case.plan.width] = window
        errors.append(_error(cache, expected))
    return max(errors)


def run_case(session: ort.InferenceSession, case: Case, layers: int) -> list[Array]:
    """Logits and every layer's cache; behind `length` the cache was filled with junk."""
    feed: dict[str, Array] = {
        "input_ids": case.input_ids,
        "row_position": case.plan.row_position,
        "window_mask": case.plan.window_mask,
        "length": np.array([case.length]),
        "logit_rows": np.arange(case.plan.width),
    }
    if any(value.name == ADAPTER_INPUT for value in session.get_inputs()):
        feed[ADAPTER_INPUT] = case.plan.lookahead_rows
    for (name, junk), past in zip(_junk(case, layers).items(), case.past, strict=True):
        feed[name] = junk
        feed[name][:, :, : case.length] = past
    found: list[Array] = session.run(None, feed)
    return found


def _junk(case: Case, layers: int, spare: int = 24) -> dict[str, Array]:
    """Caches by name, the same every time: what lies behind `length` must neither matter nor be lost."""
    capacity, random = -(-(case.length + case.plan.width + spare) // 4) * 4, np.random.default_rng(1)
    shapes = [(*past.shape[:2], capacity, past.shape[3]) for past in case.past]
    named = zip(kv_names("past", layers), shapes, case.past, strict=True)
    return {name: random.standard_normal(shape, np.float32).astype(past.dtype) for name, shape, past in named}


def _error(actual: Array, expected: Array) -> float:
    difference = np.abs(actual.astype(np.float32) - expected.astype(np.float32)).max()
    return float(difference / max(np.abs(expected.astype(np.float32)).max(), 1e-6))


def check_greedy(bundle: Path, manifest: Manifest) -> tuple[int, Difference | None]:
    """Greedy text of every mode: the fewest tokens that agree with `ar`, and a near-tie if one parts from it there."""
    session = open_session_of(bundle, manifest, LoadOptions("cpu"))
    prompt = session.encode("The quick brown fox jumps over")
    same, near_tie = GREEDY_TOKENS, None
    plain: list[int] = []
    for plan in MODES:
        options = GenerateOptions(max_new_tokens=GREEDY_TOKENS, plan=plan, ignore_eos=True)
        tokens = run_tokens(session, prompt, options).token_ids
        plain = plain or tokens
        difference = first_difference(session, prompt, options, plain, tokens)
        if difference is not None and not difference.is_near_tie:
            raise PassError(f"{plan} decoding differs from plain decoding at {difference}; please report it")
        if difference is not None and difference.index < same:
            same, near_tie = difference.index, difference
    return same, near_tie
