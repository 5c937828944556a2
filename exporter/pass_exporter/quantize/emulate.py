"""Runs the torch model with its activations rounded as in the trunk, for the exporter's check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.quantize.calibrate import activation_codes
from pass_exporter.quantize.weights import QuantizedModel, factor_name, weight_name


@dataclass(frozen=True)
class QuantizedInput:
    """A layer's input: int8 codes [1,Q,n], with zero point 0, and their scale."""

    codes: npt.NDArray[np.int8]
    scale: float

    @property
    def values(self) -> npt.NDArray[np.float32]:
        return self.codes * np.float32(self.scale)


@contextmanager
def rounded_activations(
    model: PreTrainedModel, adapter: Adapter | None, quantized: QuantizedModel
) -> Iterator[dict[str, QuantizedInput]]:
    """Round the inputs of layers with a static scale, and of their adapter, within the block.

    Yields, by a weight's name in the trunk, the rounded input that it had in the last pass.
    """
    inputs: dict[str, QuantizedInput] = {}

    def rounded(weight: str, x: torch.Tensor) -> torch.Tensor:
        scale, columns = quantized.activations[weight], quantized.columns.get(weight)
        codes = activation_codes(x, scale) if columns is None else columns.codes(x)
        inputs[weight] = QuantizedInput(codes.to(torch.int8).numpy(), scale)
        return codes * scale if columns is None else columns.dequantized(codes).to(x.dtype)

    def forward(layer: torch.nn.Linear, weight: str) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.nn.functional.linear(rounded(weight, x), layer.weight, layer.bias)

    def delta(adapter: Adapter, index: int, x: torch.Tensor) -> torch.Tensor:
        weight = factor_name("lora_A", index)
        return Adapter.delta(
            adapter, index, rounded(weight, x) if weight in quantized.activations else x
        )

    # Attributes of the objects hide the methods of their classes, until they are deleted.
    replaced: list[Any] = []
    for name, layer in (*linear_layers(model).items(), ("lm_head", model.lm_head)):
        if weight_name(name) in quantized.activations:
            layer.forward = forward(layer, weight_name(name))
            replaced.append((layer, "forward"))
    if adapter is not None:
        adapter.delta = partial(delta, adapter)  # type: ignore[method-assign]
        replaced.append((adapter, "delta"))
    try:
        yield inputs
    finally:
        for module, method in replaced:
            delattr(module, method)
