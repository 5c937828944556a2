"""Checks of a trunk that rounds activations, which one limit on its error cannot be.

A float that lies between two steps goes one way in torch and the other in ONNX Runtime, where it differs in its last
bit; more do so in every layer behind it. So the graph is compared twice: without its rounding as closely as any other,
and with it against torch's emulation, which it must be nearer to, over all layers, than rounding itself moves it.
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
from pass_exporter.quantize.weights import Quantized
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError

PREFIX = "unrounded."
LIMITS = {"float32": 0.5, "float16": 0.95}
"""Of what rounding moves the results by, in torch: how far ONNX Runtime's may be from torch's, by dtype. Without
rounding they would be 1 apart. In float32 they are 0.19 over SmolLM2's 30 layers. float16 is so coarse that one value
in sixteen falls on another step (0.82 over two random layers), bfloat16 that most do (1.08): there it tells nothing."""


def rounded_cases(model: PreTrainedModel, lookahead: Lookahead, quantized: Quantized) -> list[Case]:
    """`torch_cases` with activations rounded; none where they are not, or where no limit could be held."""
    if not quantized.activations or model.dtype == torch.bfloat16:
        return []
    with rounded_activations(model, quantized):
        return torch_cases(model, lookahead)


@contextmanager
def without_rounding(directory: Path, manifest: Manifest) -> Iterator[Manifest]:
    """A manifest whose trunks read activations as they are: the same weights file, and the graphs are removed again."""
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
    for node in list(model.graph.all_nodes()):
        if node.op_type == "QuantizeLinear" and node.inputs[0] is not None:
            for restored, _ in list(node.outputs[0].uses()):
                assert restored.graph is not None
                restored.outputs[0].replace_all_uses_with(node.inputs[0])
                restored.graph.remove(restored, safe=True)
            assert node.graph is not None
            node.graph.remove(node, safe=True)


def check_rounded(bundle: Path, manifest: Manifest, plain: Sequence[Case], rounded: Sequence[Case]) -> float:
    """Run `rounded` cases through the trunk; PassError where it is not near what torch made of them.

    plain: the same windows without rounding. Returns the error, relative and over logits and the keys and values of
    every layer, in parts of what rounding does to them.
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
