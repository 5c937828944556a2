"""A fake of TensorRT and TensorRT-RTX on the device of `fake_cuda.py`: an engine runs its graph in
ONNX Runtime, on the shapes and addresses that its execution context was given."""

from __future__ import annotations

import ctypes
import enum
import json
import math
import mmap
import weakref
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from fake_cuda import ALIGNMENT, FakeCuda

VERSION = "10.15.1.fake"
DTYPES = {"float": np.float32, "bfloat16": ml_dtypes.bfloat16}
"""The types of ONNX Runtime that have other names in numpy."""


class FakeTensorRT:
    """The module `tensorrt`, whose engines run on the device `cuda`."""

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
        assert isinstance(data, mmap.mmap), "engine files must be mapped, not read"
        self.cuda.use_device()
        refused = self.fails("deserialize_cuda_engine")
        return None if refused else FakeEngine(self, json.loads(bytes(data)))

    def fails(self, function: str) -> bool:
        """Return whether `function` is to fail; log its errors as TensorRT does if it is."""
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
    """A cache of compiled kernels, each named by its graph and shapes."""

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
    def __init__(self, library: FakeTensorRT, plan: dict[str, Any]) -> None:
        self.trt, self.plan, self.device_memory_size_v2 = library, plan, library.scratch
        self.session = _session(plan["onnx"])
        values = self.session.get_inputs(), self.session.get_outputs()
        self.inputs, self.outputs = ({value.name: value for value in each} for each in values)
        self.tensors = self.inputs | self.outputs
        self.num_optimization_profiles = len(plan["profiles"])
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        mode = self.trt.TensorIOMode
        return mode.INPUT if name in self.inputs else mode.OUTPUT

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(-1 if isinstance(size, str) else size for size in self.tensors[name].shape)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.plan["aliases"].get(name)

    def create_runtime_config(self) -> FakeRuntimeConfig:
        assert isinstance(self.trt, FakeTensorRTX), "TensorRT needs no configuration here"
        return FakeRuntimeConfig(self.trt)

    def create_execution_context(self, made_with: Any) -> FakeContext | None:
        config = made_with if isinstance(made_with, FakeRuntimeConfig) else None
        strategy = made_with if config is None else config.allocation
        self.trt.cuda.use_device()
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
        self.last_shapes: dict[str, tuple[int, ...]] = {}  # of the last run outside a capture
        self.changes = 0  # how often the profile, a shape or an address was set

    def set_device_memory(self, address: int, size: int) -> None:
        assert self.cuda.on_device(address, size) and size >= self.engine.device_memory_size_v2
        self.scratch = address
        self.changes += 1

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream in self.cuda.streams
        self.profile = index
        self.changes += 1
        if self.engine.trt.fails("set_optimization_profile_async"):
            return False
        return 0 <= index < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if self.engine.trt.fails("set_input_shape"):
            return False
        tensor = self.engine.inputs.get(name)
        profile = self.engine.plan["profiles"][self.profile]
        if tensor is None or len(tensor.shape) != len(shape):
            return False
        for size, dimension in zip(shape, tensor.shape, strict=True):
            is_dynamic = isinstance(dimension, str)
            least, _, largest = profile[dimension] if is_dynamic else (dimension,) * 3
            if not least <= size <= largest:
                return False
        self.engine.trt.shapes_set += 1
        self.changes += 1
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
        self.changes += 1
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert type(stream) is int and stream in self.cuda.streams and self.scratch
        self.cuda.use_device()
        library = self.engine.trt
        library.fail_run -= 1
        if library.fail_run == 0 or self.cuda.sticky_error or library.fails("execute_async_v3"):
            return False
        assert self.cuda.error == 0, "the engine would take an older error for its own"
        assert set(self.shapes) == set(self.engine.inputs), "an input has no shape"
        assert set(self.addresses) == set(self.engine.tensors), "a tensor has no address"
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        if self.cuda.capturing is None:
            self.last_shapes = shapes
            self.cuda.submit(lambda: self._run(shapes, addresses))
        else:
            assert self.last_shapes == shapes, "captured with shapes that it has not run with"
            self.cuda.submit(self._replay())
        return True

    def _replay(self) -> Callable[[], None]:
        context_reference, changes = weakref.ref(self), self.changes

        def work() -> None:
            context = context_reference()
            assert context is not None, "a graph is launched whose context is gone"
            assert context.changes == changes, "a graph is launched whose context was changed"
            context._run(context.shapes, context.addresses)

        return work

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        engine = self.engine
        for output, source in engine.plan["aliases"].items():
            assert addresses[output] == addresses[source], "the cache is not updated in place"
        feed = {name: self._view(name, shapes[name], addresses).copy() for name in engine.inputs}
        outputs = engine.session.run(None, feed)
        for name, value in zip(engine.outputs, outputs, strict=True):
            self._view(name, value.shape, addresses)[...] = value

    def _view(self, name: str, shape: tuple[int, ...], addresses: dict[str, int]) -> np.ndarray:
        kind = self.engine.tensors[name].type.removeprefix("tensor(").removesuffix(")")
        dtype = np.dtype(DTYPES.get(kind, kind))
        size = math.prod(shape) * dtype.itemsize
        assert self.cuda.on_device(addresses[name], size), f"{name} is not in the device's memory"
        memory = (ctypes.c_ubyte * size).from_address(addresses[name])
        return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


class FakeRTXContext(FakeContext):
    """A context that compiles a kernel for the shapes it runs with: before the run if its strategy
    is EAGER, else (the default) during later runs, which a captured graph would not notice."""

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
        elif self.last_shapes != self.shapes:
            cache = self.config.cache or FakeRuntimeCache()
            kernel = f"{self.engine.plan['onnx']} {sorted(self.shapes.items())}"
            library.compiled += kernel not in cache.kernels
            cache.kernels.add(kernel)
        return super().execute_async_v3(stream)
