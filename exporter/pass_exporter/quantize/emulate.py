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

    def forward(layer: torch.nn.Linear, scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.nn.functional.linear(round_activations(x, scale), layer.weight, layer.bias)

    layers = linear_layers(model)
    static = {name: scale for name in layers if (scale := quantized.activations.get(weight_name(name))) is not None}
    for name, scale in static.items():
        layers[name].forward = forward(layers[name], scale)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        for name in static:
            del layers[name].forward
