"""Builds one serialized engine from one ONNX graph, with TensorRT or TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pass_exporter.progress import Step
from pass_runtime.backends.trt.library import Library, import_library, make_logger
from pass_runtime.bundle.manifest import Graph, Profile
from pass_runtime.errors import PassError


@dataclass(frozen=True)
class Source:
    """graph: the manifest's entry. model: the serialized graph, changed for TensorRT. path: the
    bundle's file, beside which its weights are. aliases: outputs that overwrite the memory of an
    input."""

    graph: Graph
    model: bytes
    path: Path
    profiles: tuple[Profile, ...]
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def engine_file(self) -> str:
        return f"{self.graph.file.removesuffix('.onnx')}.engine"


class EngineBuilder:
    """targets: compute capabilities such as `sm89`; () is this machine's GPU. workspace: the limit
    in bytes on scratch memory."""

    def __init__(
        self,
        library: Library,
        targets: Sequence[str] = (),
        workspace: int | None = None,
        timing_cache: bytes = b"",
    ) -> None:
        self._trt = import_library(library)
        self.library, self._targets, self.workspace = library, tuple(targets), workspace
        self._errors: list[str] = []
        self._logger = make_logger(self._trt, self._errors)
        self._builder = self._trt.Builder(self._logger)
        self.timing_cache = timing_cache
        """The serialized timing cache, to which every build adds; b"" if the library has none."""

    @property
    def version(self) -> str:
        return str(self._trt.__version__)

    def build(self, source: Source, step: Step) -> bytes:
        """Return a serialized engine. Ctrl-C stops the build after the current step. Raises
        PassError if the library cannot build the graph."""
        self._errors.clear()
        network = self._parse(source)
        config = self._config(network, source)
        monitor = _make_monitor(self._trt, step)
        config.progress_monitor = monitor
        engine = self._builder.build_serialized_network(network, config)
        if monitor.interruption is not None:
            raise monitor.interruption
        if engine is None:
            targets = f" for {', '.join(self._targets)}" if self._targets else ""
            errors = (each for each in dict.fromkeys(self._errors) if _NO_DRIVER_ERROR not in each)
            reason = "; ".join(errors)[:600] or "it gave no reason"
            raise PassError(
                f"{source.graph.file}: {self.library.name} {self.version} cannot build it"
                f"{targets}: {reason}; {_REDUCING_HINT}"
            )
        if self.library.timing_cache:
            self.timing_cache = bytes(config.get_timing_cache().serialize())
        return bytes(engine)

    def _parse(self, source: Source) -> Any:
        trt = self._trt
        # A library without this flag always keeps the dtypes of the graph (is strongly typed).
        strongly_typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
        network = self._builder.create_network(
            0 if strongly_typed is None else 1 << int(strongly_typed)
        )
        parser = trt.OnnxParser(network, self._logger)
        if not parser.parse(source.model, str(source.path)):
            raise PassError(f"{source.graph.file}: {self._parse_error(parser)}; {_REDUCING_HINT}")
        for i in range(network.num_layers):
            layer = network.get_layer(i)
            if layer.type == trt.LayerType.ATTENTION_INPUT:
                # `get_layer` returns the base class, which lacks `attention`.
                layer.__class__ = trt.IAttentionInputLayer
                # Targets without a fused kernel for attention (as in fp32) run several kernels.
                layer.attention.decomposable = True
        return network

    def _parse_error(self, parser: Any) -> str:
        error = parser.get_error(0)
        name, operator = error.node_name(), error.node_operator()
        unsupported = f"node {name!r} ({operator})" if name else "the model"
        return (
            f"{self.library.name} {self.version} does not support {unsupported}: "
            f"{' '.join(error.desc().split())}"
        )

    def _config(self, network: Any, source: Source) -> Any:
        trt, config = self._trt, self._builder.create_builder_config()
        if self._targets:
            config.num_compute_capabilities = len(self._targets)
            for i, target in enumerate(self._targets):
                config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), i)
        if self.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, self.workspace)
        if self.library.timing_cache:
            config.set_timing_cache(config.create_timing_cache(self.timing_cache), True)
        # Without this flag, a kernel may allocate memory, which a CUDA graph cannot capture.
        if self.library.compiles_kernels:
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        for profile in source.profiles:
            config.add_optimization_profile(self._profile(network, profile))
        return config

    def _profile(self, network: Any, profile: Profile) -> Any:
        trt_profile = self._builder.create_optimization_profile()
        for tensor in map(network.get_input, range(network.num_inputs)):
            ranges = [
                profile.sizes[tensor.get_dimension_name(axis)] if size == -1 else (size,) * 3
                for axis, size in enumerate(tensor.shape)
            ]
            # The smallest shape, the shape to tune for, the largest shape
            trt_profile.set_shape(tensor.name, *zip(*ranges, strict=True))
        return trt_profile


_NO_DRIVER_ERROR = "cudaError 35"
"""Logged on every machine without a GPU; never the reason why a build fails."""
_REDUCING_HINT = "CONTRIBUTING.md (Reducing a failing graph) shows how to find the part that fails"


def _make_monitor(trt: Any, report: Step) -> Any:
    """Return a monitor that reports the outermost phase. An exception in it, such as
    KeyboardInterrupt, must not pass through the library: `interruption` keeps it."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.interruption: BaseException | None = None
            self._outermost: tuple[str, int] | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            try:
                if not parent_phase:
                    self._outermost = (phase_name, num_steps)
            except BaseException as error:
                self.interruption = error

        def step_complete(self, phase_name: str, step: int) -> bool:
            try:
                if self._outermost is not None and phase_name == self._outermost[0]:
                    report(step + 1, self._outermost[1])
            except BaseException as error:
                self.interruption = error
            return self.interruption is None

        def phase_finish(self, phase_name: str) -> None:
            """Do nothing: the interface requires this method."""

    return Monitor()
