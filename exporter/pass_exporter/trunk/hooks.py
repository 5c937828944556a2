"""Replaces parts of transformers while a decoder is traced, so that it becomes a few standard
operators:

    attention interface      -> Attention        (opset 24; grouped heads, bool mask)
    KV cache                 -> TensorScatter    (opset 24; writes the window at `length`)
    apply_rotary_pos_emb     -> RotaryEmbedding  (opset 23)
    *RMSNorm.forward         -> RMSNormalization (opset 23)

TensorRT recognises them as an in-place KV cache with fused attention.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.onnx.ops import symbolic
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "pass_onnx"

_Buffers = Sequence[torch.Tensor | None]


class ScatterCache:
    """The part of transformers' `Cache` that a decoder layer calls. keys, values: the buffers
    [B,KVH,S,D] of each layer, or None. `update` writes a window [B,KVH,Q,D] from entry `length`
    ([B] int64) on."""

    is_compileable = False

    def __init__(self, keys: _Buffers, values: _Buffers, length: torch.Tensor) -> None:
        self.keys, self.values, self.length = list(keys), list(values), length

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.keys[layer_idx] = self._scatter(self.keys[layer_idx], key)
        values = self.values[layer_idx] = self._scatter(self.values[layer_idx], value)
        return keys, values

    def _scatter(self, past: torch.Tensor | None, window: torch.Tensor) -> torch.Tensor:
        assert past is not None
        return symbolic(
            "TensorScatter",
            (past, window, self.length),
            {"axis": -2, "mode": "linear"},
            dtype=past.dtype,
            shape=past.shape,
            version=24,
        )

    def get_seq_length(self, *_: Any) -> int:
        return 0  # Nothing depends on it: the trunk gives positions and masks itself.


def _attention(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [B,H,Q,D], key and value [B,KVH,S,D], mask [B,1,Q,S] bool -> [B,Q,H,D]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = symbolic(
        "Attention",
        (query, key, value, mask),
        {"scale": float(scale)},
        dtype=query.dtype,
        shape=query.shape,
        version=24,
    )
    return out.transpose(1, 2), None


def _rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [B,H,Q,D] and key [B,KVH,Q,D] by cos and sin [B,Q,R], of which the second half
    equals the first. R < D rotates a part of a head. OLMo2 gives float32 tables to a model in
    float16."""
    rotated = cos.shape[-1]
    half_cos, half_sin = (table[..., : rotated // 2].to(query.dtype) for table in (cos, sin))
    attributes: dict[str, Any] = (
        {} if rotated == query.shape[-1] else {"rotary_embedding_dim": rotated}
    )

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return symbolic(
            "RotaryEmbedding",
            (x, half_cos, half_sin),
            attributes,
            dtype=x.dtype,
            shape=x.shape,
            version=23,
        )

    return rotate(query), rotate(key)


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    epsilon = getattr(self, "variance_epsilon", getattr(self, "eps", 1e-6))
    # Gemma's weight is the scale minus one.
    scale = 1.0 + self.weight if type(self).__name__.startswith("Gemma") else self.weight
    return symbolic(
        "RMSNormalization",
        (x, scale),
        {"axis": -1, "epsilon": float(epsilon)},
        dtype=x.dtype,
        shape=x.shape,
        version=23,
    )


@contextmanager
def onnx_hooks(model: PreTrainedModel) -> Iterator[None]:
    """Patch the modeling module of `model` within the block."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    module = importlib.import_module(type(model).__module__)
    patched: list[tuple[Any, str, Any]] = [
        (module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb)
    ]
    module.apply_rotary_pos_emb = _rotary  # type: ignore[attr-defined]
    for name in dir(module):
        if name.endswith("RMSNorm"):
            norm = getattr(module, name)
            patched.append((norm, "forward", norm.forward))
            norm.forward = _rms_norm
    previous = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        model.config._attn_implementation = previous
        for owner, name, original in patched:
            setattr(owner, name, original)
