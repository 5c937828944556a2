"""A model's linear layers on their grids: rounded once, in place, and kept packed for the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.quantize.grid import Packed, round_to
from pass_exporter.quantize.sites import find_sites
from pass_exporter.quantize.spec import Grid, Kind, QuantSpec
from pass_exporter.threads import one_thread


@dataclass
class Quantized:
    """What became of a model. weights: by the name of the trunk's initializer, as `model.lm_head.weight`.

    activations: the scale of what a weight's layer reads. calibration: the text that was run through the model for it.
    """

    spec: QuantSpec
    weights: dict[str, Packed] = field(default_factory=dict)
    activations: dict[str, float] = field(default_factory=dict)
    calibration: str | None = None

    @property
    def weight_only(self) -> tuple[str, ...]:
        """The decoder's layers whose activations are not rounded though the spec says so."""
        if self.spec.activations is None:
            return ()
        decoder = (name for name in self.weights if name.startswith(DECODER) and name not in self.activations)
        return tuple(name.removeprefix(DECODER).removesuffix(".weight") for name in decoder)


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
    scales: Mapping[str, float] | None = None,
) -> Quantized:
    """Replace every linear layer's weight, and the adapter's factors, by what their grids keep of them.

    A weight that is also the embedding table is given to the LM head as a copy: lookups stay exact. rounded: layers
    that are on their grid already, by name. scales: of the activations that layers read, by layer, where the spec has
    such.
    """
    quantized = Quantized(
        spec,
        {weight_name(name): packed for name, packed in (rounded or {}).items()},
        {weight_name(layer): scale for layer, scale in (scales or {}).items()},
    )
    jobs = [job for job in (*_layers(model, quantized), *_factors(adapter, spec)) if job[0] not in quantized.weights]
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


def _layers(model: PreTrainedModel, quantized: Quantized) -> Iterator[Job]:
    spec = quantized.spec
    if spec.grid is not None:
        sensitive = _readers(model, "attention_in") if spec.sensitive else set()
        for layer, module in linear_layers(model).items():
            name = weight_name(layer)
            static = spec.activations
            grid = spec.grid if static is None or name in quantized.activations else static.otherwise
            yield name, spec.sensitive if layer in sensitive and spec.sensitive else grid, module, "weight"
    if spec.lm_head is not None:
        yield weight_name("lm_head"), spec.lm_head, model.lm_head, "weight"


def _readers(model: PreTrainedModel, kind: Kind) -> set[str]:
    return {layer for site in find_sites(model) if site.kind == kind for layer in site.readers}


def _factors(adapter: Adapter | None, spec: QuantSpec) -> Iterator[Job]:
    if adapter is not None and spec.adapter is not None:
        for part in ("lora_A", "lora_B"):
            for index in range(len(adapter.names)):
                yield f"adapter.{part}.{index}", spec.adapter, getattr(adapter, part), str(index)
