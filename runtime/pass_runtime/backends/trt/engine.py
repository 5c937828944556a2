"""Loads TensorRT engines; `Program` replays a series of calls as a CUDA graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.memory import DeviceLost
from pass_runtime.backends.trt.engine_sets import Shared, log
from pass_runtime.bundle.manifest import EngineFile, Graph
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.tensors import COLUMNS, WINDOW_TENSORS
from pass_runtime.errors import PassError

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class EngineCall:
    """profile: the index of an optimization profile. shapes: of the inputs. addresses: of inputs
    and outputs."""

    profile: int
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]

    @property
    def key(self) -> tuple[object, ...]:
        return self.profile, *sorted(self.shapes.items()), *sorted(self.addresses.items())


def engine_shapes(
    graph: Graph, capacity: int, least_width: int, *, trunk: bool
) -> dict[str, Shape]:
    """Return the shapes for a cache of `capacity` tokens and windows of at least `least_width`
    rows."""
    shapes: dict[str, Shape] = {COLUMNS: (COLUMNS,)} if trunk else {}
    for tensor in (*graph.inputs, *graph.outputs):
        # Windows of fixed width are padded, too.
        min_rows = least_width if tensor.name in WINDOW_TENSORS else 0
        sizes = (capacity if size == "capacity" else size for size in tensor.shape)
        shapes[tensor.name] = tuple(
            size if isinstance(size, str) else max(size, min_rows) for size in sizes
        )
    return shapes


def _matches(built: Sequence[int] | None, listed: Shape | None) -> bool:
    if built is None or listed is None or len(built) != len(listed):
        return False
    return all(
        isinstance(size, str) or built_size in (-1, size)
        for built_size, size in zip(built, listed, strict=True)
    )


class TrtEngine:
    """A loaded engine file. Every distinct call has its own execution context, bound once: a
    CUDA graph is only valid while its context keeps profile, shapes and addresses."""

    def __init__(
        self, shared: Shared, files: OpenFiles, file: EngineFile, shapes: Mapping[str, Shape]
    ) -> None:
        """files: of the set. Raises PassError if the engine cannot be loaded, or is not what the
        manifest describes."""
        self._shared, self._cuda, self._file = shared, shared.cuda, file
        self._path = path = files.folder / file.file
        shared.clear_errors()
        self._engine = shared.runtime.deserialize_cuda_engine(files.data[file.file])
        if self._engine is None:
            raise PassError(
                f"{path} cannot be loaded on this GPU (deserialize_cuda_engine: "
                f"{shared.reason()}); if the file is the cause, build it again with pass-export "
                "build"
            )
        self._check(shapes)
        kernels = shared.compiled_kernels
        self._config = None if kernels is None else kernels.config(self._engine)
        self._scratch = shared.scratch(int(self._engine.device_memory_size_v2))
        self._contexts: dict[tuple[object, ...], Any] = {}

    def _check(self, shapes: Mapping[str, Shape]) -> None:
        engine, file = self._engine, self._file
        if engine.num_optimization_profiles != len(file.profiles):
            raise PassError(
                f"{self._path} has {engine.num_optimization_profiles} profiles and the manifest "
                f"lists {len(file.profiles)}; build it again with pass-export build"
            )
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        built = {name: tuple(engine.get_tensor_shape(name)) for name in names}
        for name in {**shapes, **built}:
            if not _matches(built.get(name), shapes.get(name)):
                actual, listed = built.get(name, "missing"), shapes.get(name, "missing")
                raise PassError(
                    f"{self._path} and the manifest differ in the shape of {name}: {actual} and "
                    f"{listed}; build it again with pass-export build"
                )
        output = self._shared.library.TensorIOMode.OUTPUT
        outputs = [name for name in names if engine.get_tensor_mode(name) == output]
        sources = {name: engine.get_aliased_input_tensor(name) for name in outputs}
        if {name: source for name, source in sources.items() if source} != file.aliases:
            raise PassError(
                f"{self._path} does not update its KV cache in place as the manifest says; build "
                "it again with pass-export build"
            )

    @property
    def aliases(self) -> Mapping[str, str]:
        """Output -> the input whose memory it shares."""
        return self._file.aliases

    def profile(self, sizes: Mapping[str, int]) -> int:
        """Return the first profile that admits `sizes`. Raises PassError without one."""
        for index, profile in enumerate(self._file.profiles):
            if profile.admits(sizes):
                return index
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise PassError(
            f"{self._path} was not built for {listed}; build it again with pass-export build"
        )

    def enqueue(self, call: EngineCall) -> None:
        """Raises PassError if the library refuses the call."""
        context = self._context(call)
        self._shared.clear_errors()
        if not context.execute_async_v3(self._cuda.stream):
            raise PassError(
                f"{self._path} failed to run (execute_async_v3: {self._shared.reason()})"
            )

    def capturable(self, call: EngineCall) -> bool:
        """TensorRT can always be captured; TensorRT-RTX is asked."""
        capturable = getattr(self._context(call), "is_stream_capturable", None)
        return capturable is None or bool(capturable(self._cuda.stream))

    def _context(self, call: EngineCall) -> Any:
        if call.key not in self._contexts:
            self._shared.clear_errors()
            context = self._new_context()
            self._bind(context, call)
            self._contexts[call.key] = context
        return self._contexts[call.key]

    def _new_context(self) -> Any:
        library = self._shared.library
        config = self._config or library.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(config)
        if context is None:
            raise self._refusal("gets no execution context", "create_execution_context")
        context.set_device_memory(*self._scratch)
        return context

    def _bind(self, context: Any, call: EngineCall) -> None:
        if call.profile and not context.set_optimization_profile_async(
            call.profile, self._cuda.stream
        ):
            raise self._refusal(
                f"does not take profile {call.profile}", "set_optimization_profile_async"
            )
        self._cuda.synchronize()
        for name, shape in call.shapes.items():
            if not context.set_input_shape(name, shape):
                raise self._refusal(
                    f"refuses shape {shape} for {name} in profile {call.profile}", "set_input_shape"
                )
        for name, address in call.addresses.items():
            if not context.set_tensor_address(name, address):
                raise self._refusal(f"refuses the address of {name}", "set_tensor_address")

    def _refusal(self, what: str, function: str) -> PassError:
        return PassError(f"{self._path} {what} ({function}: {self._shared.reason()})")

    def close(self) -> None:
        """Free contexts before the engine, as TensorRT requires."""
        self._contexts.clear()
        self._config = self._engine = None


class Program:
    """Runs engine calls, then copies results to the host. After two runs all of it is captured
    as a CUDA graph, if possible."""

    def __init__(
        self,
        name: str,
        cuda: Cuda,
        work: Sequence[tuple[TrtEngine, EngineCall]],
        copies: Sequence[tuple[npt.NDArray[Any], int]] = (),
        *,
        captures: dict[str, str | None],
    ) -> None:
        """copies: pinned host arrays with device addresses."""
        self._name, self._cuda, self._work, self._copies = name, cuda, work, copies
        self._captures = captures
        self._runs = 0
        self._graph: Any = None

    def run(self) -> None:
        """Return when the device has done all calls and copies."""
        if self._graph is not None:
            self._cuda.launch(self._graph)
            self._cuda.synchronize()
            return
        self._enqueue()
        self._cuda.synchronize()
        self._runs += 1
        if self._runs == 2:  # The first run with new shapes may allocate, which a capture must not.
            self._capture()

    def _capture(self) -> None:
        try:
            if not all(engine.capturable(call) for engine, call in self._work):
                raise PassError("is_stream_capturable says no")
            self._graph = self._cuda.capture(self._enqueue)
            self._captures[self._name] = None
        except DeviceLost:
            raise
        except PassError as error:
            self._captures[self._name] = str(error)
            log.warning("%s runs without a CUDA graph, and so more slowly: %s", self._name, error)

    def _enqueue(self) -> None:
        for engine, call in self._work:
            engine.enqueue(call)
        for array, address in self._copies:
            self._cuda.enqueue_download(array, address)
