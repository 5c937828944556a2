"""Do a bundle's graphs build in TensorRT? TensorRT-RTX parses and builds ahead of time on a machine without a GPU.

A gate for the operator pattern, not an engine builder: what is built here is thrown away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from pass_runtime.errors import PassError
from pass_runtime.manifest import Graph, Manifest, PlanInfo

CAPACITY = 512
Profile = Mapping[str, int]
"""Sizes of the symbolic dimensions: batch, width, logit_rows, lookahead_rows, positions."""


def import_tensorrt_rtx() -> Any:
    try:
        import tensorrt_rtx
    except ImportError:
        raise PassError("TensorRT-RTX is not installed; run: pip install 'pass-toolkit[tensorrt]'") from None
    return tensorrt_rtx


def trunk_profiles(manifest: Manifest, batches: Sequence[int] = (1, 4)) -> list[Profile]:
    """One profile per batch and plan width, and one for prefill."""
    windows = sorted({(1 + plan.drafts + sum(plan.groups), sum(plan.groups)) for plan in manifest.plans})
    decode = [{"batch": b, "width": w, "logit_rows": w, "lookahead_rows": a} for b in batches for w, a in windows]
    return [*decode, {"batch": 1, "width": 64, "logit_rows": 1, "lookahead_rows": 0}]


def tail_profiles(plan: PlanInfo, positions: int, batches: Sequence[int] = (1, 4)) -> list[Profile]:
    """One profile per batch for the tails of `plan`."""
    rows = sum(plan.groups)
    sizes = {"width": 1 + plan.drafts + rows, "lookahead_rows": rows, "positions": positions}
    return [{"batch": batch, **sizes} for batch in batches]


def build_graph(bundle: Path, graph: Graph, profiles: Sequence[Profile], target: str = "SM120") -> int:
    """Parse and build one graph for a compute capability; returns the engine's bytes, raises PassError if it fails."""
    trt = import_tensorrt_rtx()
    logger = _Errors(trt)
    builder = trt.Builder(logger.as_logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger.as_logger)
    path = bundle / graph.file
    if not parser.parse(_static_capacity(path), str(path)):
        error = parser.get_error(0)
        raise PassError(
            f"{graph.file}: TensorRT-RTX refuses node {error.node_name()} ({error.node_operator()}): {error.desc()}"
        )
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True  # fused where the target can, decomposed elsewhere (fp32)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, target), 0)
    for sizes in profiles:
        config.add_optimization_profile(_profile(builder, network, graph, sizes))
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise PassError(f"{graph.file}: TensorRT-RTX cannot build it for {target}: {' '.join(logger.messages)[:500]}")
    return int(engine.nbytes)


def _static_capacity(path: Path) -> bytes:
    """TensorRT wants the cache's capacity static."""
    model = onnx.load(path, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "capacity":
                dimension.ClearField("dim_param")
                dimension.dim_value = CAPACITY
    serialized: bytes = model.SerializeToString()
    return serialized


def _profile(builder: Any, network: Any, graph: Graph, sizes: Profile) -> Any:
    profile = builder.create_optimization_profile()
    shapes = {tensor.name: tensor.shape for tensor in graph.inputs}
    sizes = {**sizes, "capacity": CAPACITY}
    for i in range(network.num_inputs):
        name = network.get_input(i).name
        shape = [sizes[size] if isinstance(size, str) else size for size in shapes[name]]
        profile.set_shape(name, shape, shape, shape)
    return profile


class _Errors:
    """A TensorRT logger that keeps the errors."""

    def __init__(self, trt: Any) -> None:
        messages: list[str] = []

        class Logger(trt.ILogger):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                    messages.append(message)

        self.messages = messages
        self.as_logger = Logger()
