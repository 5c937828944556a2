"""torch's model with activations rounded as the graph rounds them, for the exporter's check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import linear_layers
from pass_exporter.quantize.calibrate import round_activations
from pass_exporter.quantize.weights import QuantizedModel, weight_name


@contextmanager
def rounded_activations(model: PreTrainedModel, quantized: QuantizedModel) -> Iterator[None]:
    """Within the block, layers with a static scale read rounded inputs. Their adapters read the unrounded ones."""

    def forward(layer: torch.nn.Linear, weight: str) -> Callable[[torch.Tensor], torch.Tensor]:
        scale, columns = quantized.activations[weight], quantized.columns.get(weight)

        def rounded(x: torch.Tensor) -> torch.Tensor:
            read = round_activations(x, scale) if columns is None else columns.rounded(x)
            return torch.nn.functional.linear(read, layer.weight, layer.bias)

        return rounded

    layers = {weight_name(name): layer for name, layer in (*linear_layers(model).items(), ("lm_head", model.lm_head))}
    static = [layers[name] for name in quantized.activations]
    for name, layer in zip(quantized.activations, static, strict=True):
        layer.forward = forward(layer, name)
    try:
        yield
    finally:
        for layer in static:
            del layer.forward
