"""The functions of CUDA and TensorRT that the backend calls, on the CPU: device memory is watched
host memory, and an engine runs its graph in ONNX Runtime on the addresses and shapes that it gets.

The fake refuses what a real device would refuse or corrupt: stale and unaligned addresses, shapes
outside the profile, a cache output that is not bound over its input, synchronizing and allocating
inside a capture, capturing a context with other shapes than it ran with, replaying a graph whose
context was bound again or is gone, use after free. Work is done as late as a device may do it, when
the host waits: what is read or overwritten before that is junk.
"""

from __future__ import annotations

import ctypes
import enum
import json
import math
import mmap
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort

from pass_exporter.engines.build import graph_sources
from pass_exporter.engines.builder import Source
from pass_exporter.engines.profiles import column_steps, default_prefill_widths
from pass_runtime.backends.trt.library import LibraryName
from pass_runtime.bundle.integrity import file_info
from pass_runtime.bundle.manifest import FILE_NAME, EngineFile, EngineSet, Manifest
from pass_runtime.bundle.read import read_manifest

VERSION = "10.15.1.fake"
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}
ALIGNMENT = 256
"""Bytes: of what cudaMalloc gives, and of what an engine takes."""


class Code(enum.IntEnum):
    SUCCESS = 0
    OUT_OF_MEMORY = 2
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901


class Handle:
    """cuda-python's handles are objects that turn into numbers when asked."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number


class FakeCuda:
    """`cuda.bindings.runtime`. `limit`: bytes of device memory. Counters say what was done.

    fail_malloc: counts down with every allocation; the one that makes it 0 fails. sticky: once set,
    every function returns that code and does nothing. fail_capture: the name of the function that
    fails in a capture. devices: how many GPUs there are; worked: the numbers of those that were
    used, where each thread uses its current device.
    """

    sticky = 0
    OF_NO_DEVICE = (
        *("cudaGetDevice", "cudaSetDevice", "cudaGetDeviceCount"),
        *("cudaDeviceAttr", "cudaDeviceGetAttribute", "cudaGetDeviceProperties"),
    )
    """Functions that do not use the current device; the last three name one in their arguments."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuda") and self.sticky:
            return lambda *_: (
                (self.sticky,)
                if name in ("cudaStreamSynchronize", "cudaGetLastError")
                else (self.sticky, None)
            )
        if name.startswith("cuda") and name not in FakeCuda.OF_NO_DEVICE:
            self.work()
        return super().__getattribute__(name)

    def __init__(
        self, limit: int = 1 << 30, target: tuple[int, int] = (9, 0), devices: int = 1
    ) -> None:
        self.limit, self.target, self.devices = limit, target, devices
        self.worked: set[int] = set()
        self.of_thread = threading.local()
        self.blocks: dict[int, np.ndarray] = {}
        self.fail_malloc = 0
        self.fail_capture = ""
        self.pending: list[Callable[[], None]] = []
        self.pinned: dict[int, np.ndarray] = {}
        self.streams: set[int] = set()
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.capturing: list[Callable[[], None]] | None = None
        self.error = Code.SUCCESS  # of the last call that failed; cudaGetLastError resets it
        self.undestroyed = 0  # captured graphs that were not destroyed after instantiation
        self.mallocs = self.launches = self.captures = self.launched_outside_a_graph = 0
        self._handles = iter(range(1, 1 << 30))

    def work(self) -> None:
        """Note that the calling thread's device is used."""
        self.worked.add(getattr(self.of_thread, "device", 0))

    def cudaGetDevice(self):
        return Code.SUCCESS, getattr(self.of_thread, "device", 0)

    def cudaSetDevice(self, ordinal: int):
        assert 0 <= ordinal < self.devices
        self.of_thread.device = ordinal
        return (Code.SUCCESS,)

    @property
    def used(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())

    def on_device(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + b.nbytes
            for start, b in self.blocks.items()
        )

    def submit(self, work: Callable[[], None]) -> None:
        if self.capturing is not None:
            self.capturing.append(work)
        else:
            self.launched_outside_a_graph += 1
            self.pending.append(work)

    def finish(self) -> None:
        """Do what is on the stream."""
        assert self.capturing is None
        while self.pending:
            self.pending.pop(0)()

    def failed(self, code: Code) -> Code:
        self.error = code
        return code

    def captures_fail_in(self, name: str) -> bool:
        return self.fail_capture == name and bool(self.failed(Code.STREAM_CAPTURE_INVALIDATED))

    def is_pinned(self, address: int, size: int) -> bool:
        return any(a <= address and address + size <= a + p.nbytes for a, p in self.pinned.items())

    def cudaGetDeviceCount(self):
        return Code.SUCCESS, self.devices

    def cudaDeviceGetAttribute(self, attribute: int, _device: int):
        return Code.SUCCESS, self.target[attribute - 75]

    def cudaGetDeviceProperties(self, _device: int):
        return Code.SUCCESS, SimpleNamespace(name=b"Fake GPU\0\0")

    def cudaMemGetInfo(self):
        return Code.SUCCESS, self.limit - self.used, self.limit

    def refuses_allocation(self) -> bool:
        assert self.capturing is None, "a capture would be broken off"
        self.fail_malloc -= 1
        return self.fail_malloc == 0

    def cudaMalloc(self, size: int):
        if self.refuses_allocation() or self.used + size > self.limit:
            return self.failed(Code.OUT_OF_MEMORY), None
        self.mallocs += 1
        block = np.full(size + ALIGNMENT, 0xA5, np.uint8)  # fresh memory holds junk
        start = -block.ctypes.data % ALIGNMENT
        block = block[start : start + size]
        self.blocks[block.ctypes.data] = block
        return Code.SUCCESS, block.ctypes.data

    def cudaGetLastError(self):
        error, self.error = self.error, Code.SUCCESS
        return (error,)

    def cudaFree(self, address: int):
        self.finish()
        del self.blocks[address]
        return (Code.SUCCESS,)

    def cudaMallocHost(self, size: int):
        if self.refuses_allocation():
            return self.failed(Code.OUT_OF_MEMORY), None
        block = np.zeros(size, np.uint8)
        self.pinned[block.ctypes.data] = block
        return Code.SUCCESS, block.ctypes.data

    def cudaFreeHost(self, address: int):
        self.finish()
        del self.pinned[address]
        return (Code.SUCCESS,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, _stream: int):
        assert self.on_device(address, size)
        self.submit(lambda: (ctypes.memset(address, value, size), None)[1])
        return (Code.SUCCESS,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int):
        assert stream in self.streams
        assert self.on_device(target if kind == 1 else source, size), "not the device's memory"
        pinned = self.is_pinned(source if kind == 1 else target, size)
        if self.capturing is not None:
            assert kind == 2 and pinned, "must be pinned"
        if kind == 1 and not pinned:  # pageable memory is read before the call returns
            copied = ctypes.string_at(source, size)
            self.submit(lambda: (ctypes.memmove(target, copied, size), None)[1])
        else:
            self.submit(lambda: (ctypes.memmove(target, source, size), None)[1])
        if kind == 2 and not pinned:  # pageable memory is filled before the call returns
            self.finish()
        return (Code.SUCCESS,)

    def cudaMemcpy2DAsync(self, *arguments: int):
        target, pitch, source, source_pitch, width, height, kind, stream = arguments
        assert stream in self.streams and kind == 3 and width <= min(pitch, source_pitch)
        for start, step in ((target, pitch), (source, source_pitch)):
            assert height == 0 or self.on_device(start, (height - 1) * step + width)

        def copy() -> None:
            for row in range(height):
                ctypes.memmove(target + row * pitch, source + row * source_pitch, width)

        self.submit(copy)
        return (Code.SUCCESS,)

    def cudaStreamCreateWithFlags(self, _flags: int):
        self.streams.add(number := next(self._handles))
        return Code.SUCCESS, Handle(number)

    def cudaStreamDestroy(self, stream: int):
        self.streams.remove(stream)
        return (Code.SUCCESS,)

    def cudaStreamSynchronize(self, stream: int):
        assert stream in self.streams
        if self.capturing is not None:
            return (self.failed(Code.STREAM_CAPTURE_UNSUPPORTED),)
        self.finish()
        return (Code.SUCCESS,)

    def cudaStreamBeginCapture(self, _stream: int, _mode: int):
        assert self.capturing is None
        if self.captures_fail_in("cudaStreamBeginCapture"):
            return (self.error,)
        self.capturing = []
        return (Code.SUCCESS,)

    def cudaStreamEndCapture(self, _stream: int):
        graph, self.capturing = self.capturing, None
        if self.captures_fail_in("cudaStreamEndCapture"):
            return self.error, None
        self.undestroyed += 1
        return Code.SUCCESS, graph

    def cudaGraphInstantiate(self, graph: list, _flags: int):
        if self.captures_fail_in("cudaGraphInstantiate"):
            return self.error, None
        self.captures += 1
        self.graphs[handle := next(self._handles)] = graph
        return Code.SUCCESS, handle

    def cudaGraphDestroy(self, _graph: list):
        self.undestroyed -= 1
        return (Code.SUCCESS,)

    def cudaGraphExecDestroy(self, handle: int):
        del self.graphs[handle]
        return (Code.SUCCESS,)

    def cudaGraphLaunch(self, handle: int, stream: int):
        assert stream in self.streams
        self.launches += 1
        self.pending.extend(self.graphs[handle])
        return (Code.SUCCESS,)


def driver(
    version: int, answer: tuple[int, int | None] = (35, None), library: int = 13040
) -> SimpleNamespace:
    """CUDA without a usable GPU, with a driver for this version; 0 is none, which is error 35 too.

    answer: that of cudaGetDeviceCount.
    """
    return SimpleNamespace(
        cudaGetDeviceCount=lambda: answer,
        cudaDriverGetVersion=lambda: (0, version),
        cudaRuntimeGetVersion=lambda: (0, library),
        cudaGetDevice=lambda: (0, 0),
        cudaStreamCreateWithFlags=lambda _: (35, None),
        cudaGetLastError=lambda: (35,),
    )


class FakeTensorRT:
    """The module `tensorrt`, running against `cuda`. Counters say how many contexts were made, and
    how often one was given a shape.

    fail_run: counts down with every execution, captured ones too; the one that makes it 0 fails.
    refuses: names of functions that contexts and the runtime refuse. compiled: how many kernels
    were compiled while engines ran (by `FakeTensorRTX` only). scratch: bytes of scratch memory that
    engines loaded from now on need.
    """

    __version__, __name__ = VERSION, "tensorrt"
    TensorIOMode = enum.Enum("TensorIOMode", "INPUT OUTPUT")
    ExecutionContextAllocationStrategy = enum.Enum(
        "ExecutionContextAllocationStrategy", "STATIC USER_MANAGED"
    )

    class ILogger:
        ERROR, INTERNAL_ERROR, WARNING, INFO = 1, 2, 3, 4

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.fail_run, self.contexts, self.shapes_set = cuda, 0, 0, 0
        self.refuses: set[str] = set()
        self.compiled, self.scratch = 0, 4096

    def Runtime(self, logger: Any) -> SimpleNamespace:
        self.logger = logger
        return SimpleNamespace(deserialize_cuda_engine=self._deserialize)

    def _deserialize(self, data: Any) -> FakeEngine | None:
        assert isinstance(data, mmap.mmap), "an engine is read into memory"
        self.cuda.work()
        refused = self.fails("deserialize_cuda_engine")
        return None if refused else FakeEngine(self, json.loads(bytes(data)))

    def fails(self, function: str) -> bool:
        """Whether `function` is refused, which is logged."""
        if function in self.refuses:
            self.logger.log(self.ILogger.WARNING, f"{function} has been\n asked for")
            self.logger.log(self.ILogger.ERROR, f"[{function}.cpp::7] Error Code 3: of a kind")
        return function in self.refuses


class FakeTensorRTX(FakeTensorRT):
    """The module `tensorrt_rtx`: it compiles a kernel when a context first runs with new shapes."""

    __name__ = "tensorrt_rtx"
    DynamicShapesKernelSpecializationStrategy = enum.Enum(
        "DynamicShapesKernelSpecializationStrategy", "LAZY EAGER NONE"
    )


class FakeRuntimeCache:
    """A cache of compiled kernels, by graph and shapes."""

    def __init__(self) -> None:
        self.kernels: set[str] = set()

    def serialize(self) -> bytes:
        return json.dumps(sorted(self.kernels)).encode()

    def deserialize(self, blob: bytes) -> bool:
        try:
            self.kernels |= set(json.loads(blob))
        except ValueError:
            return False
        return True


class FakeRuntimeConfig:
    """What contexts of TensorRT-RTX are made with."""

    def __init__(self, library: FakeTensorRTX) -> None:
        self.allocation = library.ExecutionContextAllocationStrategy.STATIC
        self.dynamic_shapes_kernel_specialization_strategy = (
            library.DynamicShapesKernelSpecializationStrategy.LAZY
        )
        self.cache: FakeRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.allocation = strategy

    def create_runtime_cache(self) -> FakeRuntimeCache:
        return FakeRuntimeCache()

    def set_runtime_cache(self, cache: FakeRuntimeCache) -> bool:
        self.cache = cache
        return True


class FakeEngine:
    """An engine file here is JSON: the graph's path, its tensors, profiles and aliases."""

    def __init__(self, library: FakeTensorRT, plan: dict[str, Any]) -> None:
        self.trt, self.plan, self.device_memory_size_v2 = library, plan, library.scratch
        self.tensors = plan["inputs"] | plan["outputs"]
        self.num_optimization_profiles = len(plan["profiles"])
        self.num_io_tensors = len(self.tensors)
        self.session = _session(plan["onnx"])

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        mode = self.trt.TensorIOMode
        return mode.INPUT if name in self.plan["inputs"] else mode.OUTPUT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(size, str) else size for size in self.tensors[name]["shape"])

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.plan["aliases"].get(name)

    def create_runtime_config(self) -> FakeRuntimeConfig:
        assert isinstance(self.trt, FakeTensorRTX), "not needed"
        return FakeRuntimeConfig(self.trt)

    def create_execution_context(self, made_with: Any) -> FakeContext | None:
        config = made_with if isinstance(made_with, FakeRuntimeConfig) else None
        strategy = made_with if config is None else config.allocation
        self.trt.cuda.work()
        assert strategy is self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self.trt.fails("create_execution_context"):
            return None
        self.trt.contexts += 1
        if isinstance(self.trt, FakeTensorRTX):
            return FakeRTXContext(self, config or FakeRuntimeConfig(self.trt))
        return FakeContext(self)


@lru_cache(maxsize=64)
def _session(path: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.cuda = engine, engine.trt.cuda
        self.profile, self.scratch = 0, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.ran: dict[str, tuple[int, ...]] = {}  # shapes of the last run outside a capture
        self.bound = 0  # counts the changes of its profile, shapes and addresses

    def set_device_memory(self, address: int, size: int) -> None:
        assert self.cuda.on_device(address, size) and size >= self.engine.device_memory_size_v2
        self.scratch = address
        self.bound += 1

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream in self.cuda.streams
        self.profile = index
        self.bound += 1
        if self.engine.trt.fails("set_optimization_profile_async"):
            return False
        return 0 <= index < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self.engine.trt.fails("set_input_shape"):
            return False
        described = self.engine.plan["inputs"].get(name)
        sizes = self.engine.plan["profiles"][self.profile]
        if described is None or len(described["shape"]) != len(shape):
            return False
        for size, listed in zip(shape, described["shape"], strict=True):
            low, _, high = sizes[listed] if isinstance(listed, str) else (listed,) * 3
            if not low <= size <= high:
                return False
        self.engine.trt.shapes_set += 1
        self.bound += 1
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self.engine.tensors or self.engine.trt.fails("set_tensor_address"):
            return False
        assert address % ALIGNMENT == 0, f"{name} is not aligned"
        for pair in self.engine.plan["aliases"].items():
            if name in pair:
                (other,) = set(pair) - {name}
                assert self.addresses.get(other, address) == address, f"{name} is not at {other}"
        self.addresses[name] = address
        self.bound += 1
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert type(stream) is int and stream in self.cuda.streams and self.scratch
        self.cuda.work()
        library = self.engine.trt
        library.fail_run -= 1
        if library.fail_run == 0 or self.cuda.sticky or library.fails("execute_async_v3"):
            return False
        assert self.cuda.error == 0, "the engine would take an older error for its own"
        assert set(self.shapes) == set(self.engine.plan["inputs"]), "an input has no shape"
        assert set(self.addresses) == set(self.engine.tensors), "a tensor has no address"
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        if self.cuda.capturing is None:
            self.ran = shapes
        assert self.ran == shapes, "captured with shapes that it has not run with"
        if self.cuda.capturing is None:
            self.cuda.submit(lambda: self._run(shapes, addresses))
        else:
            self.cuda.submit(self._replay())
        return True

    def _replay(self) -> Callable[[], None]:
        """The work of a captured graph, which uses this context without keeping it alive."""
        context, bound = weakref.ref(self), self.bound

        def work() -> None:
            captured = context()
            assert captured is not None, "a graph is launched whose context is gone"
            assert captured.bound == bound, "a graph is launched whose context was bound anew"
            captured._run(captured.shapes, captured.addresses)

        return work

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        plan = self.engine.plan
        for output, source in plan["aliases"].items():
            assert addresses[output] == addresses[source], "the cache is not updated in place"
        feed = {name: self._view(name, shapes[name], addresses).copy() for name in plan["inputs"]}
        names = list(plan["outputs"])
        for name, value in zip(names, self.engine.session.run(names, feed), strict=True):
            self._view(name, value.shape, addresses)[...] = value

    def _view(self, name: str, shape: tuple[int, ...], addresses: dict[str, int]) -> np.ndarray:
        dtype = DTYPES.get(kind := self.engine.tensors[name]["dtype"]) or np.dtype(kind)
        size = math.prod(shape) * dtype.itemsize
        assert self.cuda.on_device(addresses[name], size), f"{name} is not in the device's memory"
        memory = (ctypes.c_ubyte * size).from_address(addresses[name])
        return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


class FakeRTXContext(FakeContext):
    """A context that compiles a kernel by shapes: before it runs, or (default) some time later."""

    def __init__(self, engine: FakeEngine, config: FakeRuntimeConfig) -> None:
        super().__init__(engine)
        self.config = config

    def is_stream_capturable(self, stream: int) -> bool:
        assert stream in self.cuda.streams
        return "is_stream_capturable" not in self.engine.trt.refuses

    def execute_async_v3(self, stream: int) -> bool:
        library = self.engine.trt
        assert isinstance(library, FakeTensorRTX)
        eager = library.DynamicShapesKernelSpecializationStrategy.EAGER
        if self.cuda.capturing is not None:
            assert self.config.dynamic_shapes_kernel_specialization_strategy is eager, (
                "another kernel will take the place of the captured one"
            )
        elif self.ran != self.shapes:
            cache = self.config.cache or FakeRuntimeCache()
            kernel = f"{self.engine.plan['onnx']} {sorted(self.shapes.items())}"
            library.compiled += kernel not in cache.kernels
            cache.kernels.add(kernel)
        return super().execute_async_v3(stream)


def add_fake_engines(
    bundle: Path,
    capacity: int,
    least_width: int = 1,
    max_batch_size: int = 1,
    library: LibraryName = "tensorrt",
) -> Manifest:
    """Give `bundle` an engine set that FakeTensorRT, or FakeTensorRTX, can load."""
    manifest = read_manifest(bundle)
    columns = column_steps(capacity)
    engines = EngineSet(
        directory="fake",
        library=library,
        version=VERSION,
        targets=("sm90",),
        bundle=manifest.content_hash,
        lookahead=manifest.lookahead.length,
        max_batch_size=max_batch_size,
        capacities=columns,
        prefill_widths=default_prefill_widths(manifest, columns),
        engines=(),
    )
    directory = engines.path(bundle)
    directory.mkdir(parents=True)
    sources = graph_sources(bundle, manifest, columns, max_batch_size, least_width)
    files = tuple(_write_plan(bundle, directory, source) for source in sources)
    manifest = manifest.model_copy(
        update={"engines": (engines.model_copy(update={"engines": files}),)}
    )
    (bundle / FILE_NAME).write_text(manifest.model_dump_json(), encoding="utf-8")
    return manifest


def _write_plan(bundle: Path, directory: Path, source: Source) -> EngineFile:
    path = bundle / f".{source.graph.file}"  # beside the external data
    path.write_bytes(source.model)
    sizes = [profile.sizes for profile in source.profiles]
    plan = {"onnx": str(path), "profiles": sizes, "aliases": source.aliases} | {
        side: {t.name: {"dtype": t.dtype, "shape": t.shape} for t in getattr(source, side)}
        for side in ("inputs", "outputs")
    }
    engine = directory / f"{source.graph.file}.engine"
    engine.write_text(json.dumps(plan), encoding="utf-8")
    info = file_info(engine)
    return EngineFile(
        graph=source.graph.file,
        file=engine.name,
        sha256=info.sha256,
        bytes=info.bytes,
        profiles=source.profiles,
        aliases=source.aliases,
    )
