"""Checks of a trunk that rounds activations to 8 bits, for which one limit on the error is not enough.

A float halfway between two codes may be rounded up in torch and down in ONNX Runtime, because its last bit differs. The
difference of one code is then a hundredth of the tensor's values, and every later layer adds to it: after some layers
the results are as far apart as with any other rounding. So the graph reads torch's codes in place of its own. Then its
results must be as near to torch's as those of any other graph, and its own codes, which nothing reads, must be torch's
but for such halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from pass_exporter.checks.cases import Array, Case
from pass_exporter.checks.widen import rounds_activations
from pass_exporter.quantize.rewrite import SCALE_SUFFIX
from pass_runtime.bundle.manifest import Manifest

PREFIX = "given_codes."
OWN, GIVEN = "rounded.own.", "rounded.given."


@contextmanager
def with_given_codes(directory: Path, manifest: Manifest) -> Iterator[Manifest]:
    """A manifest of trunks that read what layers read (`given_feed`), and give what they would have (`own_difference`).

    The trunks use the same weights file and are removed afterwards. `manifest` itself if its trunks round nothing.
    """
    if not rounds_activations(manifest):
        yield manifest
        return
    trunk = manifest.trunk.model_copy(update={"file": f"{PREFIX}{manifest.trunk.file}"})
    derived = tuple(each.model_copy(update={"file": f"{PREFIX}{each.file}"}) for each in manifest.derived)
    files = [manifest.trunk.file, *(each.file for each in manifest.derived)]
    try:
        for file in files:
            model = ir.load(directory / file)
            _give_codes(model.graph)
            ir.save(model, directory / f"{PREFIX}{file}")
        yield manifest.model_copy(update={"trunk": trunk, "derived": derived})
    finally:
        for file in files:
            (directory / f"{PREFIX}{file}").unlink(missing_ok=True)


def _give_codes(graph: ir.Graph) -> None:
    """Every rounded tensor's readers read an input of the graph; the tensor is an output."""
    for node in [node for node in graph if node.op_type == "DequantizeLinear"]:
        own, scale = node.outputs[0], node.inputs[1]
        assert scale is not None
        if str(scale.name).endswith(SCALE_SUFFIX):
            weight = str(scale.name).removesuffix(SCALE_SUFFIX)
            given = ir.Value(name=f"{GIVEN}{weight}", type=own.type, shape=own.shape)
            own.replace_all_uses_with(given)
            own.name = f"{OWN}{weight}"
            graph.inputs.append(given)
            graph.outputs.append(own)


def given_feed(case: Case) -> dict[str, Array]:
    """What torch's layers read, as the inputs of a graph of `with_given_codes`."""
    dtype = case.past[0].dtype
    return {f"{GIVEN}{name}": rounded.values.astype(dtype) for name, rounded in case.rounded.items()}


def own_difference(case: Case, outputs: Mapping[str, Array]) -> float:
    """The mean difference between torch's codes and the graph's own, in the layer in which it is largest; 0 without."""
    differences = [0.0]
    for name, own in outputs.items():
        if name.startswith(OWN) and own.size:
            rounded = case.rounded[name.removeprefix(OWN)]
            differences.append(float(np.abs(own.astype(np.float32) - rounded.values).mean()) / rounded.scale)
    return max(differences)
