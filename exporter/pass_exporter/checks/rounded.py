"""Checks of a trunk that rounds activations to 8 bits, for which one limit on the error is not enough.

A float halfway between two codes may be rounded up in torch and down in ONNX Runtime, where its last bit differs, and
every later layer adds more such cases. So the graph is compared with torch twice. Without its rounding it must be as
near as any other graph. With its rounding it is compared with torch's emulation of it: over all layers, the two must
be nearer to each other than rounding itself moves the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from pass_exporter.checks.verify import Case, rows_expected, run_cases, torch_cases
from pass_exporter.checks.widen import rounds_activations
from pass_exporter.model.lookahead import Lookahead
from pass_exporter.quantize.emulate import rounded_activations
from pass_exporter.quantize.weights import QuantizedModel
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError

PREFIX = "unrounded."
LIMITS = {"float32": 0.5, "float16": 0.95}
"""The largest distance between ONNX Runtime's results and torch's by dtype, where 1 is the distance that rounding moves
torch's results by. A graph that did not round would be at 1. In float32 the distance is 0.19 over SmolLM2's 30 layers.
In float16 one value in sixteen gets another code (0.82 over two random layers). In bfloat16 most values do (1.08), so
that the check would show nothing there."""


def rounded_cases(model: PreTrainedModel, lookahead: Lookahead, quantized: QuantizedModel) -> list[Case]:
    """`torch_cases` with rounded activations; [] if the model does not round them, or has a dtype without a limit."""
    if not quantized.activations or model.dtype == torch.bfloat16:
        return []
    with rounded_activations(model, quantized):
        return torch_cases(model, lookahead)


@contextmanager
def without_rounding(directory: Path, manifest: Manifest) -> Iterator[Manifest]:
    """A manifest of trunks that do not round activations. They use the same weights file and are removed afterwards."""
    if not rounds_activations(manifest):
        yield manifest
        return
    files = [manifest.trunk.file, *(derived.file for derived in manifest.derived)]
    try:
        for file in files:
            model = ir.load(directory / file)
            _remove_rounding(model)
            ir.save(model, directory / f"{PREFIX}{file}")
        trunk = manifest.trunk.model_copy(update={"file": f"{PREFIX}{manifest.trunk.file}"})
        derived = tuple(one.model_copy(update={"file": f"{PREFIX}{one.file}"}) for one in manifest.derived)
        yield manifest.model_copy(update={"trunk": trunk, "derived": derived})
    finally:
        for file in files:
            (directory / f"{PREFIX}{file}").unlink(missing_ok=True)


def _remove_rounding(model: ir.Model) -> None:
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear" and node.inputs[0] is not None:
            for restored, _ in list(node.outputs[0].uses()):
                restored.outputs[0].replace_all_uses_with(node.inputs[0])
                model.graph.remove(restored, safe=True)
            model.graph.remove(node, safe=True)


def check_rounded(bundle: Path, manifest: Manifest, plain: Sequence[Case], rounded: Sequence[Case]) -> float:
    """Run the `rounded` cases through the trunk; PassError if its results are too far from torch's.

    plain: the same windows in torch without rounding. Returns the distance to torch's results over logits and the keys
    and values of every layer, as a share of the distance that rounding moves them by.
    """
    if not rounded:
        return 0.0
    apart, moved = 0.0, 0.0
    runs = run_cases(bundle / manifest.trunk_file("cpu"), manifest, rounded)
    for before, case, outputs in zip(plain, rounded, runs, strict=True):
        start, end = case.length, case.length + case.plan.width
        unrounded, expected = ([*rows_expected(c, manifest), *c.window] for c in (before, case))
        rows = len(expected) - len(case.window)
        found = [*outputs[:rows], *(cache[:, :, start:end] for cache in outputs[rows:])]
        apart += sum(map(_distance, found, expected))
        moved += sum(map(_distance, unrounded, expected))
    share, limit = apart / max(moved, 1e-9), LIMITS[manifest.model.dtype]
    if not share <= limit:
        raise PassError(
            f"rounded activations differ from torch's by {share:.2g} of what rounding does (limit {limit}); "
            "this model is not exported correctly, please report it"
        )
    return share


def _distance(values: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    size = float(np.linalg.norm(expected.astype(np.float32)))
    return float(np.linalg.norm(values.astype(np.float32) - expected)) / max(size, 1e-9)
