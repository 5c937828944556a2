"""A deserialized TensorRT engine: its profiles, its contexts, and calls that are repeated as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from pass_runtime.backends.cuda import Cuda
from pass_runtime.bundle.manifest import EngineFile
from pass_runtime.errors import PassError


@dataclass(frozen=True)
class EngineCall:
    """The arguments of one run of an engine: a profile, the shapes of its inputs, and the address of every tensor."""

    profile: int
    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]


class TrtEngine:
    """One engine file. `enqueue` runs it on the stream; there is one execution context for each profile in use."""

    def __init__(self, library: Any, runtime: Any, cuda: Cuda, path: Path, file: EngineFile) -> None:
        self._library, self._cuda, self._file, self._path = library, cuda, file, path
        self._engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise PassError(f"{path} cannot be loaded on this GPU; build it again with pass-export build")
        self._check()
        # All contexts share this memory, because only one of them runs at a time.
        self._scratch_size = int(self._engine.device_memory_size_v2)
        self._scratch = cuda.allocate(self._scratch_size)
        self._contexts: dict[int, Any] = {}
        self._current: dict[int, EngineCall] = {}

    def _check(self) -> None:
        """PassError where the engine's profiles or aliases are not those of the manifest."""
        engine, file = self._engine, self._file
        if engine.num_optimization_profiles != len(file.profiles):
            raise PassError(
                f"{self._path} has {engine.num_optimization_profiles} profiles and the manifest lists "
                f"{len(file.profiles)}; build it again with pass-export build"
            )
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        outputs = [name for name in names if engine.get_tensor_mode(name) == self._library.TensorIOMode.OUTPUT]
        found = {name: engine.get_aliased_input_tensor(name) for name in outputs}
        actual = {name: source for name, source in found.items() if source}
        if actual != file.aliases:
            raise PassError(
                f"{self._path} does not update its KV cache in place as the manifest says; build it again with "
                "pass-export build"
            )

    @property
    def aliases(self) -> Mapping[str, str]:
        """Output -> the input whose memory it shares."""
        return self._file.aliases

    def profile(self, sizes: Mapping[str, int]) -> int:
        """The first profile that admits `sizes`, by symbolic dimension."""
        for index, profile in enumerate(self._file.profiles):
            if profile.admits(sizes):
                return index
        shape = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise PassError(f"{self._path} was not built for {shape}; build it again with pass-export build")

    def enqueue(self, call: EngineCall) -> None:
        """Put one run on the stream."""
        context = self._context(call.profile)
        if self._current.get(call.profile) != call:
            self._current.pop(call.profile, None)  # Nothing counts as set until all of it is.
            for name, shape in call.shapes.items():
                if not context.set_input_shape(name, shape):
                    raise PassError(f"{self._path} refuses shape {shape} for {name} in profile {call.profile}")
            for name, address in call.addresses.items():
                if not context.set_tensor_address(name, address):
                    raise PassError(f"{self._path} has no tensor {name}")
            self._current[call.profile] = call
        if not context.execute_async_v3(self._cuda.stream):
            self._cuda.check_device()
            raise PassError(f"{self._path} failed to run; the GPU may be out of memory")

    def capturable(self, call: EngineCall) -> bool:
        """Whether a CUDA graph can hold the call. TensorRT-RTX says so; with TensorRT and these operators it always
        can."""
        capturable = getattr(self._context(call.profile), "is_stream_capturable", None)
        return capturable is None or bool(capturable(self._cuda.stream))

    def _context(self, profile: int) -> Any:
        if profile not in self._contexts:
            strategy = self._library.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self._engine.create_execution_context(strategy)
            if context is None:
                raise PassError(f"the GPU has no memory left for {self._path.name}; stop other programs on it")
            context.set_device_memory(self._scratch, self._scratch_size)
            if profile and not context.set_optimization_profile_async(profile, self._cuda.stream):
                raise PassError(f"{self._path} has no profile {profile}")
            self._cuda.synchronize()
            self._contexts[profile] = context
        return self._contexts[profile]

    def close(self) -> None:
        """Free the contexts and then the engine, in the order that TensorRT requires."""
        self._current.clear()
        self._contexts.clear()
        self._engine = None


class Program:
    """Engine calls one after another, and copies of their results to the host. They run twice, are then captured as a
    CUDA graph, and replayed from there on."""

    def __init__(
        self,
        cuda: Cuda,
        work: Sequence[tuple[TrtEngine, EngineCall]],
        copies: Sequence[tuple[npt.NDArray[Any], int]] = (),
    ) -> None:
        """copies: pinned host arrays, each with the device address that it is filled from."""
        self._cuda, self._work, self._copies = cuda, work, copies
        self._repeated = False
        self._graph: Any = None

    def run(self) -> None:
        """Run everything, and return when the device is done."""
        if self._graph is not None:
            self._cuda.launch(self._graph)
            self._cuda.synchronize()
            return
        self._enqueue()
        self._cuda.synchronize()
        # Only captured after a run: the first run with new shapes may do what a capture does not allow.
        if self._repeated and all(engine.capturable(call) for engine, call in self._work):
            self._graph = self._cuda.capture(self._enqueue)
        self._repeated = True

    def _enqueue(self) -> None:
        for engine, call in self._work:
            engine.enqueue(call)
        for array, address in self._copies:
            self._cuda.enqueue_download(array, address)
