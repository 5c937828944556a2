"""Changes a trunk that rounds activations to 8 bits, so that `verify.py` can compare it with torch.

A value halfway between two codes may be rounded up in torch and down in ONNX Runtime, because its
last bit differs. One code is about a hundredth of the tensor's largest value, and later layers add
to the difference, so even a correct graph's logits differ much from torch's.

Therefore the layers of the changed graph read torch's codes. Two things are then checked: the
graph's outputs agree with torch's within the usual limit, and the codes that the graph itself
computes, which no layer reads, agree with torch's but for the few values that are halfway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from pass_exporter.checks.cases import Array, Case
from pass_exporter.checks.widen import has_static_activations
from pass_exporter.quantize.rewrite import SCALE_SUFFIX
from pass_runtime.bundle.manifest import Manifest

FILE_PREFIX = "torch_codes."
GRAPH_PREFIX, TORCH_PREFIX = "codes.graph.", "codes.torch."
"""Prefixes of the changed graph's additional outputs and inputs, before a weight's name: the
dequantized codes of the weight's input that the graph computes, and those that torch computed."""


@contextmanager
def with_torch_codes(directory: Path, manifest: Manifest) -> Iterator[Manifest]:
    """Yield a manifest with changed trunks. Their layers read the inputs of `torch_codes_feed`
    instead of what the graph rounds itself, which becomes outputs for `codes_difference`.

    The changed trunks use the same weights file, and are removed after the block. Yields `manifest`
    itself if its activations are not rounded.
    """
    if not has_static_activations(manifest):
        yield manifest
        return
    trunk = manifest.trunk.model_copy(update={"file": f"{FILE_PREFIX}{manifest.trunk.file}"})
    derived = tuple(
        each.model_copy(update={"file": f"{FILE_PREFIX}{each.file}"}) for each in manifest.derived
    )
    files = [manifest.trunk.file, *(each.file for each in manifest.derived)]
    try:
        for file in files:
            model = ir.load(directory / file)
            _read_torch_codes(model.graph)
            ir.save(model, directory / f"{FILE_PREFIX}{file}")
        yield manifest.model_copy(update={"trunk": trunk, "derived": derived})
    finally:
        for file in files:
            (directory / f"{FILE_PREFIX}{file}").unlink(missing_ok=True)


def _read_torch_codes(graph: ir.Graph) -> None:
    """Make rounded tensors outputs of the graph, and let their readers read new inputs instead."""
    for node in [node for node in graph if node.op_type == "DequantizeLinear"]:
        rounded, scale = node.outputs[0], node.inputs[1]
        assert scale is not None
        if str(scale.name).endswith(SCALE_SUFFIX):  # of an activation, not of a weight
            weight = str(scale.name).removesuffix(SCALE_SUFFIX)
            torch_codes = ir.Value(
                name=f"{TORCH_PREFIX}{weight}", type=rounded.type, shape=rounded.shape
            )
            rounded.replace_all_uses_with(torch_codes)
            rounded.name = f"{GRAPH_PREFIX}{weight}"
            graph.inputs.append(torch_codes)
            graph.outputs.append(rounded)


def torch_codes_feed(case: Case) -> dict[str, Array]:
    """Return the inputs that `with_torch_codes` adds to a trunk: torch's dequantized codes."""
    dtype = case.past[0].dtype
    return {
        f"{TORCH_PREFIX}{name}": rounded.values.astype(dtype)
        for name, rounded in case.rounded.items()
    }


def codes_difference(runs: Iterable[tuple[Case, Mapping[str, Array]]]) -> float:
    """Return the mean difference, in codes, between torch's codes and the graph's in the layer
    where it is largest; 0 if activations are not rounded.

    runs: cases, and the graph's outputs for each. A layer's mean is over all cases together: a
    narrow window of a tiny model has so few values that one value halfway between two codes would
    make the mean larger than the limit.
    """
    differences: dict[str, list[Array]] = {}
    for case, outputs in runs:
        for name, values in outputs.items():
            if name.startswith(GRAPH_PREFIX):
                expected = case.rounded[name.removeprefix(GRAPH_PREFIX)]
                in_codes = np.abs(values.astype(np.float32) - expected.values) / expected.scale
                differences.setdefault(name, []).append(in_codes.ravel())
    means = (float(np.concatenate(layer).mean()) for layer in differences.values())
    return max(means, default=0.0)
