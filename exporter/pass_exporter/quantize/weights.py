"""A model's linear layers on their grids: rounded once, in place, and kept packed for the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.quantize.grid import Packed, round_to
from pass_exporter.quantize.spec import Grid, QuantSpec
from pass_exporter.threads import one_thread


@dataclass
class Quantized:
    """What became of a model. weights: by the name of the trunk's initializer, as `model.lm_head.weight`.

    calibration: the text that was run through the model for it.
    """

    spec: QuantSpec
    weights: dict[str, Packed] = field(default_factory=dict)
    calibration: str | None = None


DECODER = "model.model."


def weight_name(layer: str) -> str:
    """layers.0.mlp.up_proj -> the trunk's name of its weight."""
    return "model.lm_head.weight" if layer == "lm_head" else f"{DECODER}{layer}.weight"


def layer_name(weight: str) -> str | None:
    """The other way; None for what is neither a layer of the decoder nor the LM head."""
    if weight == weight_name("lm_head"):
        return "lm_head"
    return weight.removeprefix(DECODER).removesuffix(".weight") if weight.startswith(DECODER) else None


def quantize_model(
    model: PreTrainedModel,
    adapter: Adapter | None,
    spec: QuantSpec,
    progress: Callable[[int, int], None],
    rounded: Mapping[str, Packed] | None = None,
) -> Quantized:
    """Replace every linear layer's weight, and the adapter's factors, by what their grids keep of them.

    A weight that is also the embedding table is given to the LM head as a copy: lookups stay exact. rounded: layers
    that are on their grid already, by name.
    """
    quantized = Quantized(spec, {weight_name(name): packed for name, packed in (rounded or {}).items()})
    jobs = [job for job in (*_layers(model, spec), *_factors(adapter, spec)) if job[0] not in quantized.weights]
    with one_thread():
        for done, (name, grid, module, attribute) in enumerate(jobs):
            weight = getattr(module, attribute)
            if grid.fits(weight.shape[1]):
                packed = quantized.weights[name] = round_to(grid, weight.detach().to(model.dtype))
                setattr(module, attribute, torch.nn.Parameter(packed.restored(), requires_grad=False))
            progress(done + 1, len(jobs))
    return quantized


Job = tuple[str, Grid, torch.nn.Module, str]
"""Name in the trunk, grid, and where the weight is: module and attribute."""


def _layers(model: PreTrainedModel, spec: QuantSpec) -> Iterator[Job]:
    if spec.grid is not None:
        for name, layer in linear_layers(model).items():
            yield weight_name(name), spec.grid, layer, "weight"
    if spec.lm_head is not None:
        yield weight_name("lm_head"), spec.lm_head, model.lm_head, "weight"


def _factors(adapter: Adapter | None, spec: QuantSpec) -> Iterator[Job]:
    if adapter is not None and spec.adapter is not None:
        for part in ("lora_A", "lora_B"):
            for index in range(len(adapter.names)):
                yield f"adapter.{part}.{index}", spec.adapter, getattr(adapter, part), str(index)
