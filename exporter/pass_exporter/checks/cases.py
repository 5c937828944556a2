"""Runs random windows in torch before an export; `verify.py` compares the trunk with the results.

The model is transformers' own, without the exporter's changes. The trunk runs later, when torch has
released its copy of the weights.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from pass_exporter.model.lookahead import LookaheadWeights
from pass_exporter.model.sliding import attention_masks, layer_windows
from pass_exporter.trunk.trace import Trunk
from pass_runtime.bundle.plan import Plan, bundle_plans, prefill_plan

LARGE_MODEL_BYTES = 300 << 20
"""A model with more bytes of weights than this is large: the copies of the weights that ONNX
Runtime makes (packed for its kernels, or widened to float32) may not fit into memory."""
MAX_CHECKED_WINDOW = 1024
"""The largest sliding window, in tokens, that is checked: the text before the checked pass has to
be longer than the window, and such a text takes torch minutes."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A window after `length` tokens of text, and torch's results for it.

    past: the KV cache before the window: the keys [1,KVH,length,D] of every layer, then the values
    of every layer.
    window: the keys and values [1,KVH,Q,D] of the window, in the same order.
    logits: [1,Q,V]. hidden: [1,Q,H], the LM head's input.
    """

    plan: Plan
    length: int
    input_ids: Array
    past: list[Array]
    window: list[Array]
    logits: Array
    hidden: Array


def torch_cases(
    model: PreTrainedModel, lookahead_weights: LookaheadWeights, seed: int = 0
) -> list[Case]:
    """Run a random window of every plan of the bundle and a prefill chunk, each after a short text.

    Of a large model only `ar` and the last three plans run: all would take minutes, because CPUs
    lack fast kernels for 16-bit dtypes. If layers have a sliding window, the last plan also runs
    after a text that is longer than the window.
    """
    rng = np.random.default_rng(seed)
    plans = bundle_plans(lookahead_weights.lookahead, trees=lookahead_weights.head is not None)
    if 2 * model.num_parameters() > LARGE_MODEL_BYTES:  # two bytes for each, whatever the dtype
        plans = (plans[0], *plans[-3:])
    sliding = max(
        (window for window in layer_windows(model.config) if window is not None), default=0
    )
    plans_and_min_lengths = [(plan, 0) for plan in (*plans, prefill_plan(16))]
    if 0 < sliding <= MAX_CHECKED_WINDOW:
        plans_and_min_lengths.append((plans[-1], sliding))
    return [
        _torch_case(model, lookahead_weights, plan, rng, min_length)
        for plan, min_length in plans_and_min_lengths
    ]


@torch.no_grad()
def _torch_case(
    model: PreTrainedModel,
    lookahead_weights: LookaheadWeights,
    plan: Plan,
    rng: np.random.Generator,
    min_length: int,
) -> Case:
    """Run one window after a random text of at least `min_length` tokens."""
    trunk, vocab = Trunk(model, lookahead_weights), model.config.vocab_size
    length = min_length + int(rng.integers(3, 40))
    cache = DynamicCache()
    text = torch.from_numpy(rng.integers(0, vocab, (1, length)))
    model.model(input_ids=text, past_key_values=cache, use_cache=True)
    past = _entries(cache, slice(0, length))
    root_and_drafts = rng.integers(0, vocab, plan.width - sum(plan.groups))
    input_ids = np.concatenate([root_and_drafts, plan.lookahead_ids(vocab)])[None].astype(np.int64)
    mask = np.concatenate([np.ones((plan.width, length), np.bool_), plan.window_mask], 1)
    row_positions = torch.from_numpy(length + plan.row_position)[None]
    column_positions = torch.cat([torch.arange(length)[None], row_positions], 1)
    with _adapted(model, lookahead_weights, torch.from_numpy(input_ids[0] >= vocab)):
        hidden = model.model(
            inputs_embeds=trunk.embed(torch.from_numpy(input_ids)),
            attention_mask=attention_masks(
                model.config, torch.from_numpy(mask)[None, None], row_positions, column_positions
            ),
            position_ids=row_positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    logits = model.lm_head(hidden).float().numpy()
    window = _entries(cache, slice(length, None))
    return Case(plan, length, input_ids, past, window, logits, hidden.float().numpy())


def _adapted(
    model: PreTrainedModel, lookahead_weights: LookaheadWeights, is_lookahead: torch.Tensor
) -> AbstractContextManager[None]:
    """Apply the adapter to the rows for which `is_lookahead` [Q] is true. Unlike the trunk, this
    computes the adapter's results for all rows, and then chooses."""
    adapter = lookahead_weights.adapter
    if adapter is None:
        return nullcontext()
    return adapter.attached(
        model, lambda y, x, i: torch.where(is_lookahead[:, None], y + adapter.delta(i, x), y)
    )


def _entries(cache: DynamicCache, columns: slice) -> list[Array]:
    """Return copies of the cache's entries in `columns`: the keys of every layer, then the values
    of every layer."""
    tensors = [
        getattr(layer, part)[:, :, columns] for part in ("keys", "values") for layer in cache.layers
    ]
    # numpy has no bf16; float32 represents its values exactly.
    return [
        (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
        for tensor in tensors
    ]
