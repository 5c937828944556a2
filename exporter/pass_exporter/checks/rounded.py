"""Checks a trunk that rounds activations to 8 bits. A limit on the logits' error is not enough:

A value halfway between two codes may be rounded up in torch and down in ONNX Runtime, because its
last bit differs. One code is about a hundredth of the tensor's largest value, and later layers add
to the difference, so even a correct graph's logits differ much from torch's. Therefore the checked
graph reads torch's codes instead of its own. Two things are checked: its outputs must agree with
torch's within the usual limit, and its own codes, which nothing reads, must agree with torch's
except for the few values that are halfway.
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


@contextmanager
def with_torch_codes(directory: Path, manifest: Manifest) -> Iterator[Manifest]:
    """Yield a manifest of changed trunks: layers read `torch_codes_feed` instead of the inputs that
    the graph rounds itself. These become outputs, for `codes_difference`.

    These trunks use the same weights file and are removed afterwards. Yields `manifest` itself if
    its activations are not static.
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
    """Make rounded tensors graph outputs, and let their readers read new graph inputs."""
    for node in [node for node in graph if node.op_type == "DequantizeLinear"]:
        own, scale = node.outputs[0], node.inputs[1]
        assert scale is not None
        if str(scale.name).endswith(SCALE_SUFFIX):
            weight = str(scale.name).removesuffix(SCALE_SUFFIX)
            given = ir.Value(name=f"{TORCH_PREFIX}{weight}", type=own.type, shape=own.shape)
            own.replace_all_uses_with(given)
            own.name = f"{GRAPH_PREFIX}{weight}"
            graph.inputs.append(given)
            graph.outputs.append(own)


def torch_codes_feed(case: Case) -> dict[str, Array]:
    """Return the inputs that `with_torch_codes` adds: the values of torch's codes."""
    dtype = case.past[0].dtype
    return {
        f"{TORCH_PREFIX}{name}": rounded.values.astype(dtype)
        for name, rounded in case.rounded.items()
    }


def codes_difference(runs: Iterable[tuple[Case, Mapping[str, Array]]]) -> float:
    """Return the mean difference between torch's codes and the graph's, the largest of all layers.

    runs: cases, and what the graph computed for each. Means are over all of them: a narrow window
    of a tiny model has so few values that a single one halfway between two codes would count for
    more than a hundredth.
    """
    differences: dict[str, list[Array]] = {}
    for case, outputs in runs:
        for name, own in outputs.items():
            if name.startswith(GRAPH_PREFIX):
                rounded = case.rounded[name.removeprefix(GRAPH_PREFIX)]
                found = np.abs(own.astype(np.float32) - rounded.values) / rounded.scale
                differences.setdefault(name, []).append(found.ravel())
    return max((float(np.concatenate(each).mean()) for each in differences.values()), default=0.0)
