"""Traces the small models of one architecture once in a run: most of a tiny export is tracing."""

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
IRRELEVANT_SETTINGS = ("_name_or_path", "initializer_range")
MAX_PARAMETERS = 4 << 20


@contextmanager
def traced_once(folder: Path) -> Iterator[None]:
    """Later calls of torch.onnx.export return the first one's graph with their own weights."""

    def export(module: torch.nn.Module, inputs: Any, **options: Any) -> Any:
        if sum(parameter.numel() for parameter in module.parameters()) > MAX_PARAMETERS:
            return EXPORT(module, inputs, **options)
        path = folder / f"{_architecture(module, inputs, options)}.onnx"
        made_once(path, lambda path: ir.save(EXPORT(module, inputs, **options).model, path))
        return _Program(_with_weights(ir.load(path), module))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", export)
        yield


class _Program:
    def __init__(self, model: ir.Model) -> None:
        self.model = model


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _architecture(module: Any, inputs: Any, options: dict[str, Any]) -> str:
    """Return a hash of what determines a graph. The export fails if something is missing."""
    settings = module.model.config.to_dict().items()
    config = {name: value for name, value in settings if name not in IRRELEVANT_SETTINGS}
    first_names: dict[int, str] = {}  # which weights are tied
    shapes = []
    for name, tensor in _tensors(module).items():
        shape = tensor.shape[1:] if name == "lookahead_embeddings" else tensor.shape
        shapes.append((name, shape, tensor.dtype, first_names.setdefault(id(tensor), name)))
    adapted = None if module.adapter is None else module.adapter.names
    input_lists = (each if isinstance(each, list) else [each] for each in inputs)
    examples = [[(t.shape, t.dtype) for t in some if t is not None] for some in input_lists]
    flags = (module.outputs_hidden, module.training)
    key = (type(module.model), config, shapes, adapted, flags, examples, options)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def _with_weights(model: ir.Model, module: torch.nn.Module) -> ir.Model:
    from torch.onnx._internal.exporter._core import TorchTensor

    tensors = _tensors(module)
    for name, value in model.graph.initializers.items():
        value.const_value = TorchTensor(tensors[name], name=name)
        value.shape = value.const_value.shape
    return model
