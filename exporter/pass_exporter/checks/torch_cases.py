"""Runs random windows in torch, in transformers' own model, for `trunks.py` to compare once torch
has released its weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from pass_exporter.model.families import attention_masks, layer_windows
from pass_exporter.model.lookahead import LookaheadWeights
from pass_exporter.trunk.trace import Trunk
from pass_runtime.bundle.window import Window, bundle_windows, prefill_window

LARGE_MODEL_BYTES = 300 << 20
"""With more bytes of weights, copies that ONNX Runtime makes may not fit into memory."""
MAX_CHECKED_WINDOW = 1024
"""The largest sliding window to check: a text longer than it takes torch minutes."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A window after `length` tokens of text, and torch's results for it. past, window_cache: keys
    [1,KVH,length,D] and [1,KVH,Q,D] of every layer, then values. logits: [1,Q,V]. hidden: [1,Q,H],
    the LM head's input."""

    window: Window
    length: int
    input_ids: Array
    past: list[Array]
    window_cache: list[Array]
    logits: Array
    hidden: Array


def torch_cases(
    model: PreTrainedModel, lookahead_weights: LookaheadWeights, seed: int = 0
) -> list[Case]:
    """Run a pass of every window of plans and a prefill chunk, each after a short text; of a
    large model only a few. With sliding windows, the last window also runs after a longer text."""
    rng = np.random.default_rng(seed)
    windows = bundle_windows(lookahead_weights.lookahead, copy_drafts=())
    if 2 * model.num_parameters() > LARGE_MODEL_BYTES:  # two bytes for each, whatever the dtype
        windows = (windows[0], *windows[-3:])
    sliding = max((size for size in layer_windows(model.config) if size is not None), default=0)
    windows_and_min_lengths = [(window, 0) for window in (*windows, prefill_window(16))]
    if 0 < sliding <= MAX_CHECKED_WINDOW:
        windows_and_min_lengths.append((windows[-1], sliding))
    return [
        _torch_case(model, lookahead_weights, window, rng, min_length)
        for window, min_length in windows_and_min_lengths
    ]


@torch.no_grad()
def _torch_case(
    model: PreTrainedModel,
    lookahead_weights: LookaheadWeights,
    window: Window,
    rng: np.random.Generator,
    min_length: int,
) -> Case:
    trunk, vocab = Trunk(model, lookahead_weights), model.config.vocab_size
    length = min_length + int(rng.integers(3, 40))
    cache = DynamicCache()
    text = torch.from_numpy(rng.integers(0, vocab, (1, length)))
    model.model(input_ids=text, past_key_values=cache, use_cache=True)
    past = _entries(cache, slice(0, length))
    root_and_drafts = rng.integers(0, vocab, window.width - sum(window.groups))
    input_ids = np.concatenate([root_and_drafts, window.lookahead_ids(vocab)])[None]
    mask = np.concatenate([np.ones((window.width, length), np.bool_), window.window_mask], 1)
    row_positions = torch.from_numpy(length + window.row_position)[None]
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
    window_cache = _entries(cache, slice(length, None))
    return Case(window, length, input_ids, past, window_cache, logits, hidden.float().numpy())


def _adapted(
    model: PreTrainedModel, lookahead_weights: LookaheadWeights, is_lookahead: torch.Tensor
) -> AbstractContextManager[None]:
    """Unlike the trunk, compute the adapter's results for all rows, and choose by `is_lookahead`
    [Q]."""
    adapter = lookahead_weights.adapter
    if adapter is None:
        return nullcontext()
    return adapter.attached(
        model, lambda y, x, i: torch.where(is_lookahead[:, None], y + adapter.delta(i, x), y)
    )


def _entries(cache: DynamicCache, columns: slice) -> list[Array]:
    tensors = [
        getattr(layer, part)[:, :, columns] for part in ("keys", "values") for layer in cache.layers
    ]
    # numpy has no bf16; float32 represents its values exactly.
    return [
        (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()
        for tensor in tensors
    ]
