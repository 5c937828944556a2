"""Test windows and torch's results for them, with which the exporter's checks compare the trunk.

transformers' unpatched model runs before the trunk is written. The written files run afterwards,
when torch's copy of the weights is released.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedModel

from pass_exporter.model.lookahead import LookaheadWeights
from pass_exporter.model.sliding import attention_masks, layer_windows
from pass_exporter.quantize.emulate import QuantizedInput, rounded_activations
from pass_exporter.quantize.weights import ADAPTER_PREFIX, QuantizedModel
from pass_exporter.trunk.trace import Trunk
from pass_runtime.bundle.plan import Plan, bundle_plans, prefill_plan

LARGE_MODEL_BYTES = 300 << 20
"""Above so many bytes of weights, ONNX Runtime's copies (packed, widened) may not fit into
memory."""
MAX_CHECKED_WINDOW = 1024
"""In tokens. Wider sliding windows need a longer text, which takes torch minutes."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One window after `length` committed tokens, and torch's results for it.

    past: the KV cache before the window, [1,KVH,length,D] for every layer's keys, then every
    layer's values.
    window: the window's keys and values in the same order, [1,KVH,Q,D].
    logits: [1,Q,V]. hidden: [1,Q,H], the LM head's input.
    rounded: the input of each layer with a static scale, by its weight's name.
    """

    plan: Plan
    length: int
    input_ids: Array
    past: list[Array]
    window: list[Array]
    logits: Array
    hidden: Array
    rounded: dict[str, QuantizedInput]


def torch_cases(
    model: PreTrainedModel,
    lookahead_weights: LookaheadWeights,
    quantized: QuantizedModel | None = None,
    seed: int = 0,
) -> list[Case]:
    """Run a random window of every plan of the bundle, and one of prefill; few of a large model.

    If layers have a sliding window, the widest plan also runs after a text longer than that window.
    quantized: how activations are rounded. A large model has over LARGE_MODEL_BYTES in 16 bits.
    """
    rng = np.random.default_rng(seed)
    plans = bundle_plans(lookahead_weights.lookahead, trees=lookahead_weights.head is not None)
    # All plans take minutes without kernels for the dtype.
    if 2 * model.num_parameters() > LARGE_MODEL_BYTES:
        plans = (plans[0], *plans[-3:])
    sliding = max(
        (window for window in layer_windows(model.config) if window is not None), default=0
    )
    windows = [(plan, 0) for plan in (*plans, prefill_plan(16))]
    if 0 < sliding <= MAX_CHECKED_WINDOW:
        windows.append((plans[-1], sliding))
    with ExitStack() as stack:
        rounded = (
            {}
            if quantized is None
            else stack.enter_context(
                rounded_activations(model, lookahead_weights.adapter, quantized)
            )
        )
        return [
            _torch_case(model, lookahead_weights, plan, rng, min_length, rounded)
            for plan, min_length in windows
        ]


@torch.no_grad()
def _torch_case(
    model: PreTrainedModel,
    lookahead_weights: LookaheadWeights,
    plan: Plan,
    rng: np.random.Generator,
    min_length: int,
    rounded: Mapping[str, QuantizedInput],
) -> Case:
    """Run one window after at least `min_length` tokens. rounded: gets the layers' inputs."""
    trunk, vocab = Trunk(model, lookahead_weights), model.config.vocab_size
    length = min_length + int(rng.integers(3, 40))
    cache = DynamicCache()
    prefix = torch.from_numpy(rng.integers(0, vocab, (1, length)))
    model.model(input_ids=prefix, past_key_values=cache, use_cache=True)
    past = _entries(cache, slice(0, length))
    tokens = rng.integers(0, vocab, plan.width - sum(plan.groups))
    input_ids = np.concatenate([tokens, plan.lookahead_ids(vocab)])[None].astype(np.int64)
    mask = np.concatenate([np.ones((plan.width, length), np.bool_), plan.window_mask], 1)
    rows = torch.from_numpy(length + plan.row_position)[None]
    columns = torch.cat([torch.arange(length)[None], rows], 1)
    with _adapted(model, lookahead_weights, torch.from_numpy(input_ids[0] >= vocab)):
        hidden = model.model(
            inputs_embeds=trunk.embed(torch.from_numpy(input_ids)),
            attention_mask=attention_masks(
                model.config, torch.from_numpy(mask)[None, None], rows, columns
            ),
            position_ids=rows,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    logits = model.lm_head(hidden).float().numpy()
    window = _entries(cache, slice(length, None))
    # The trunk runs the adapter on these rows alone, `_adapted` on all.
    adapted = plan.lookahead_rows
    compared = {
        name: QuantizedInput(each.codes[:, adapted], each.scale)
        if name.startswith(ADAPTER_PREFIX)
        else each
        for name, each in rounded.items()
    }
    return Case(plan, length, input_ids, past, window, logits, hidden.float().numpy(), compared)


def _adapted(
    model: PreTrainedModel, lookahead_weights: LookaheadWeights, is_lookahead: torch.Tensor
) -> AbstractContextManager[None]:
    """Apply the adapter to the rows with `is_lookahead` [Q].

    Unlike the trunk, it computes the adapter in all rows and masks the others.
    """
    adapter = lookahead_weights.adapter
    if adapter is None:
        return nullcontext()
    return adapter.attached(
        model, lambda y, x, i: torch.where(is_lookahead[:, None], y + adapter.delta(i, x), y)
    )


def _entries(cache: DynamicCache, columns: slice) -> list[Array]:
    """Return copies of the cache's columns: every layer's keys, then every layer's values."""
    parts = [
        getattr(layer, part)[:, :, columns] for part in ("keys", "values") for layer in cache.layers
    ]
    # numpy has no bf16; float32 represents its values exactly.
    return [
        (part.float() if part.dtype == torch.bfloat16 else part).numpy().copy() for part in parts
    ]
