"""Small models of one architecture are traced once in a run of the tests.

Tracing is most of what a tiny export costs, and the tests export one tiny model in many formats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from once import made_once

EXPORT = torch.onnx.export
"""For tests of the tracing itself."""
NO_PART_OF_A_GRAPH = ("_name_or_path", "initializer_range")
"""Settings of a model that do not change its graph."""
SMALL = 4 << 20
"""The most parameters of a model whose trace is kept."""


@contextmanager
def traced_once(folder: Path) -> Iterator[None]:
    """Within the block, the first trace of an architecture leaves its graph in `folder`, and later
    traces get that graph with their own weights.
    """

    def remembering(module: torch.nn.Module, inputs: Any, **options: Any) -> Any:
        if sum(parameter.numel() for parameter in module.parameters()) > SMALL:
            return EXPORT(module, inputs, **options)
        path = folder / f"{_architecture(module, inputs, options)}.onnx"
        made_once(path, lambda path: ir.save(EXPORT(module, inputs, **options).model, path))
        return _Program(_with_weights(ir.load(path), module))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", remembering)
        yield


class _Program:
    """The part of torch.onnx.ONNXProgram that the exporter reads."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by each of its names: a graph has either name of tied weights."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _architecture(module: Any, inputs: Any, options: dict[str, Any]) -> str:
    """A hash of all that determines a trunk's graph. The values of its parameters and the number of
    look-ahead embeddings do not. (An export compares the graph with torch in any case.)"""
    config = {
        name: value
        for name, value in module.model.config.to_dict().items()
        if name not in NO_PART_OF_A_GRAPH
    }
    tensors = _tensors(module)
    tied: dict[int, str] = {}
    shapes = [
        (name, t.shape[name == "lookahead_embeddings" :], t.dtype, tied.setdefault(id(t), name))
        for name, t in tensors.items()
    ]
    adapted = None if module.adapter is None else module.adapter.names
    tensors_of = (one if isinstance(one, list) else [one] for one in inputs)
    examples = [[(t.shape, t.dtype) for t in some if t is not None] for some in tensors_of]
    found = (
        type(module.model),
        config,
        shapes,
        adapted,
        module.outputs_hidden,
        module.training,
        examples,
        options,
    )
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def _with_weights(model: ir.Model, module: torch.nn.Module) -> ir.Model:
    """Set each initializer to a reference to the module's tensor of that name, as tracing does."""
    from torch.onnx._internal.exporter._core import TorchTensor

    tensors = _tensors(module)
    for name, value in model.graph.initializers.items():
        value.const_value = TorchTensor(tensors[name], name=name)
        value.shape = value.const_value.shape
    return model
