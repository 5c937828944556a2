"""Traces trunk.onnx: embeddings (of tokens and look-ahead rows), layers with a KV cache, LM head.
docs/bundle.md has its inputs and outputs, and the letters of shapes."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from pass_exporter.model.families import attention_masks
from pass_exporter.model.lookahead import LookaheadWeights
from pass_exporter.trunk.graph import OPSET, WeightParts, clean
from pass_exporter.trunk.hooks import ScatterCache, onnx_hooks
from pass_exporter.trunk.layers import CACHE_PARTS, first_of_kind, marked_layers, repeat_layers
from pass_runtime.bundle.tensors import (
    HIDDEN_OUTPUT,
    LOOKAHEAD_ROWS,
    MODEL_SIZES,
    PAST,
    PRESENT,
    cache_names,
    trunk_shapes,
)

WINDOW_INPUTS = ("input_ids", "row_position", "window_mask", "length", "logit_rows")


class Trunk(torch.nn.Module):
    """The trunk in torch: a frozen LM with look-ahead embeddings [L,H] and their adapter."""

    def __init__(self, model: PreTrainedModel, lookahead_weights: LookaheadWeights) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = int(model.config.vocab_size)
        self.lookahead_embeddings = torch.nn.Parameter(
            lookahead_weights.embeddings.to(model.dtype), requires_grad=False
        )
        self.adapter = (
            None
            if lookahead_weights.adapter is None
            else copy.deepcopy(lookahead_weights.adapter).to(model.dtype)
        )
        self.outputs_hidden = lookahead_weights.head is not None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [B,Q,H] of ids [B,Q], from two tables, so that tied embeddings stay
        one tensor."""
        is_lookahead = input_ids >= self.vocab_size
        vocabulary = self.model.get_input_embeddings()(torch.where(is_lookahead, 0, input_ids))
        rows = (input_ids - self.vocab_size).clamp(min=0)
        return torch.where(
            is_lookahead[..., None],
            torch.nn.functional.embedding(rows, self.lookahead_embeddings),
            vocabulary,
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        row_position: torch.Tensor,
        window_mask: torch.Tensor,
        length: torch.Tensor,
        logit_rows: torch.Tensor,
        past_key: list[torch.Tensor | None],
        past_value: list[torch.Tensor | None],
        lookahead_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs of trunk.onnx. past_key, past_value: by layer; None for layers that
        are not traced."""
        assert past_key[0] is not None
        capacity = past_key[0].shape[2]
        cache = ScatterCache(past_key, past_value, length)
        positions = cache_positions(length, row_position, capacity)
        mask = cache_mask(length, window_mask, capacity)
        with self._adapted(lookahead_rows):
            hidden = self.model.model(
                inputs_embeds=self.embed(input_ids),
                attention_mask=attention_masks(
                    self.model.config, mask, row_position[None], positions
                ),
                position_ids=length[:, None] + row_position[None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        logits = self.model.lm_head(hidden.index_select(1, logit_rows))
        lookahead_hidden = (
            (hidden.index_select(1, lookahead_rows).float(),) if self.outputs_hidden else ()
        )
        present = (tensor for tensor in (*cache.keys, *cache.values) if tensor is not None)
        return (logits.float(), *lookahead_hidden, *present)

    def _adapted(self, rows: torch.Tensor | None) -> AbstractContextManager[None]:
        adapter = self.adapter
        if adapter is None or rows is None:
            return nullcontext()

        def add(y: torch.Tensor, x: torch.Tensor, index: int) -> torch.Tensor:
            delta = adapter.delta(index, x.index_select(1, rows))  # [B,A,out]
            # `rows` are the last ones, so the zeros for the other rows come first.
            return y + torch.nn.functional.pad(delta, (0, 0, y.shape[1] - rows.shape[0], 0))

        return adapter.attached(self.model, add)


def cache_mask(length: torch.Tensor, window_mask: torch.Tensor, capacity: Any) -> torch.Tensor:
    """Return the entries that each row sees, [B,1,Q,S] bool: all before the window, and by
    `window_mask` [Q,Q]."""
    offset, row, row_count = _window_rows(length, window_mask[0], capacity)
    width = window_mask.shape[1]
    in_window = (offset >= 0) & (offset < row_count)
    # Indexing would be exported as GatherND, which cannot be captured as a CUDA graph.
    # [B,Q,S]
    seen = window_mask.index_select(1, row.flatten()).reshape(width, -1, capacity).permute(1, 0, 2)
    mask: torch.Tensor = (seen & in_window[:, None]) | (offset < 0)[:, None]
    return mask[:, None]


def cache_positions(
    length: torch.Tensor, row_position: torch.Tensor, capacity: Any
) -> torch.Tensor:
    """Return each entry's position [B,S] relative to `length`; after the window its last row's."""
    offset, row, _ = _window_rows(length, row_position, capacity)
    return torch.where(
        offset < 0, offset, row_position.index_select(0, row.flatten()).reshape(-1, capacity)
    )


def _window_rows(
    length: torch.Tensor, window: torch.Tensor, capacity: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each entry's offset from the window's first row, the nearest window row [B,S], and
    Q."""
    offset = torch.arange(capacity, dtype=torch.int64)[None] - length[:, None]
    # Q must be a tensor on the device: a shape is on the host, and a graph that compares it with
    # tensors on the device cannot be captured as a CUDA graph.
    row_count = torch.ones_like(window, dtype=torch.int64).sum()
    return offset, offset.clamp(min=0).minimum(row_count - 1), row_count


def trace_trunk(
    model: PreTrainedModel, lookahead_weights: LookaheadWeights
) -> tuple[ir.Model, WeightParts]:
    """Trace the trunk. Until `move_weights` is called, its initializers are the model's weights."""
    config = model.config
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Sizes of the example inputs; they are symbolic in the graph.
    batch, width, capacity = 2, 5, 64
    trunk = Trunk(model, lookahead_weights).eval()
    originals = first_of_kind(model, trunk.adapter)
    past = torch.zeros(batch, kv_heads, capacity, head_dim, dtype=model.dtype)
    cache = [past.clone() if layer == index else None for index, layer in enumerate(originals)]
    inputs: tuple[Any, ...] = (  # the arguments of `Trunk.forward`
        torch.zeros(batch, width, dtype=torch.int64),
        torch.arange(width),
        torch.ones(width, width, dtype=torch.bool).tril(),
        torch.tensor([20, 7]),
        torch.tensor([0, 2, 4]),
        cache,
        [None if keys is None else keys.clone() for keys in cache],
    )
    b, q, r, s, a = (torch.export.Dim.DYNAMIC,) * 5
    cached = [None if keys is None else {0: b, 2: s} for keys in cache]
    shapes: tuple[Any, ...] = ({0: b, 1: q}, {0: q}, {0: q, 1: q}, {0: b}, {0: r}, cached, cached)
    names = [*WINDOW_INPUTS, *cache_names(PAST, layers)]
    outputs = [
        "logits",
        *([HIDDEN_OUTPUT] if lookahead_weights.head is not None else []),
        *cache_names(PRESENT, layers),
    ]
    if lookahead_weights.needs_lookahead_rows:
        inputs, shapes, names = (
            (*inputs, torch.tensor([3, 4])),
            (*shapes, {0: a}),
            [*names, LOOKAHEAD_ROWS],
        )
    copied = [index for index, layer in enumerate(originals) if layer != index]
    skipped = {
        f"{prefix}{part}.{index}"
        for prefix in (PAST, PRESENT)
        for part in CACHE_PARTS
        for index in copied
    }
    with onnx_hooks(model), marked_layers(model, originals), _exporter_silenced(), torch.no_grad():
        program = torch.onnx.export(
            trunk,
            inputs,
            dynamo=True,
            opset_version=OPSET,
            # onnxscript's pattern matchers would keep the graph and its weights alive
            optimize=False,
            verbose=False,
            input_names=[name for name in names if name not in skipped],
            output_names=[name for name in outputs if name not in skipped],
            dynamic_shapes=shapes,
        )
    assert program is not None
    repeat_layers(program.model.graph, model, trunk.adapter, originals)
    _order(program.model.graph.inputs, names)
    _order(program.model.graph.outputs, outputs)
    dimensions = {
        name: [None if size in MODEL_SIZES else size for size in shape]
        for name, shape in trunk_shapes(layers).items()
    }
    parts = clean(program.model, dimensions)
    return program.model, parts


def _order(values: MutableSequence[ir.Value], names: Sequence[str]) -> None:
    by_name = {str(value.name): value for value in values}
    values[:] = [by_name[name] for name in names]


@contextmanager
def _exporter_silenced() -> Iterator[None]:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
