"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): a channel of large activations is divided where it is made, and
its weights are multiplied. The model computes the same; what is left for activations' 8 bits is more even.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.quantize.sites import Rows, Site

LEAST = 1e-5
"""Of channels and weights that are never used: no factor follows from them."""


def smooth(
    model: PreTrainedModel,
    adapter: Adapter | None,
    sites: Mapping[Site, torch.Tensor],
    exponent: float,
) -> dict[Site, torch.Tensor]:
    """Move factors at every site that has a source. sites: the largest magnitude of each channel [in].

    A factor is magnitude^exponent / weight^(1-exponent), weight being the channel's largest in any reader. Returns what
    the magnitudes have become.
    """
    layers, factors, after = linear_layers(model), _factors(adapter), dict(sites)
    for site, magnitude in sites.items():
        if site.source is None:
            continue
        weights = torch.stack([layers[name].weight.float().abs().amax(0) for name in site.readers]).amax(0)
        if isinstance(site.source, Rows):
            magnitude, weights = (_by_row(site.source, values) for values in (magnitude, weights))
        divisor = magnitude.clamp(min=LEAST) ** exponent / weights.clamp(min=LEAST) ** (1 - exponent)
        divisor = torch.where((magnitude > LEAST) & (weights > LEAST), divisor, 1)
        if isinstance(site.source, Rows):
            _divide_rows(layers[site.source.name], factors.get(site.source.name), site.source, divisor)
            divisor = divisor.view(-1, 1, site.source.width).expand(-1, site.source.repeats, -1).flatten()
        else:
            divisor = _divide_norm(site.source, divisor)
        after[site] = sites[site] / divisor
        for name in site.readers:
            _scale(layers[name].weight, divisor)
            if name in factors:
                _scale(factors[name][0], divisor)
    return after


def _factors(adapter: Adapter | None) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B by layer."""
    if adapter is None:
        return {}
    return dict(zip(adapter.names, zip(adapter.lora_A, adapter.lora_B, strict=True), strict=True))


def _by_row(rows: Rows, channels: torch.Tensor) -> torch.Tensor:
    """[in] -> [count]: the largest of the channels that one row makes."""
    return channels.view(-1, rows.repeats, rows.width).amax(1).flatten()


def _divide_norm(norm: Any, divisor: torch.Tensor) -> torch.Tensor:
    """Returns the divisor that it came to, as the norm's weight is rounded to its dtype."""
    offset = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0  # Gemma stores an offset from one
    before = norm.weight.float() + offset
    norm.weight.data = (before / divisor - offset).to(norm.weight.dtype)
    after = norm.weight.float() + offset
    came_to: torch.Tensor = torch.where(after != 0, before / after, 1)
    return came_to


def _divide_rows(
    layer: torch.nn.Linear, factors: tuple[torch.Tensor, torch.Tensor] | None, rows: Rows, divisor: torch.Tensor
) -> None:
    part = slice(rows.start, rows.start + rows.count)
    tensors = [layer.weight, *([] if layer.bias is None else [layer.bias]), *([] if factors is None else [factors[1]])]
    for tensor in tensors:
        by = divisor if tensor.ndim == 1 else divisor[:, None]
        tensor.data[part] = (tensor.data[part].float() / by).to(tensor.dtype)


def _scale(weight: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply the inputs [in] of a weight [out,in]."""
    weight.data = (weight.data.float() * factor).to(weight.dtype)
