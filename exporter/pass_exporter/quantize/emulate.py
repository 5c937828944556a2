"""torch's model with activations rounded as the graph rounds them, for the exporter's check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import linear_layers
from pass_exporter.quantize.calibrate import activation_codes
from pass_exporter.quantize.weights import QuantizedModel, weight_name


@dataclass(frozen=True)
class Rounded:
    """What a layer read: int8 codes [1,Q,n], with zero point 0, and their scale."""

    codes: npt.NDArray[np.int8]
    scale: float

    @property
    def values(self) -> npt.NDArray[np.float32]:
        return self.codes * np.float32(self.scale)


@contextmanager
def rounded_activations(model: PreTrainedModel, quantized: QuantizedModel) -> Iterator[dict[str, Rounded]]:
    """Within the block, layers with a static scale read rounded inputs. Their adapters read the unrounded ones.

    Yields what each layer read in the last pass, by its weight's name.
    """
    read: dict[str, Rounded] = {}

    def forward(layer: torch.nn.Linear, weight: str) -> Callable[[torch.Tensor], torch.Tensor]:
        scale, columns = quantized.activations[weight], quantized.columns.get(weight)

        def rounded(x: torch.Tensor) -> torch.Tensor:
            codes = activation_codes(x, scale) if columns is None else columns.codes(x)
            read[weight] = Rounded(codes.to(torch.int8).numpy(), scale)
            values = codes * scale if columns is None else columns.restored(codes).to(x.dtype)
            return torch.nn.functional.linear(values, layer.weight, layer.bias)

        return rounded

    layers = {weight_name(name): layer for name, layer in (*linear_layers(model).items(), ("lm_head", model.lm_head))}
    static: dict[str, Any] = {name: layers[name] for name in quantized.activations}
    for name, layer in static.items():
        layer.forward = forward(layer, name)
    try:
        yield read
    finally:
        for layer in static.values():
            del layer.forward
