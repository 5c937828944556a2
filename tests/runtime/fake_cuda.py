"""A fake of `cuda.bindings.runtime`, the functions of CUDA that the runtime calls: device memory is
host memory."""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

ALIGNMENT = 256
"""The addresses that cudaMalloc returns are multiples of this many bytes."""
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
"""The directions of a copy (`cudaMemcpyKind`)."""
COMPUTE_CAPABILITY_MAJOR = 75
"""The number of this device attribute; that of the minor number follows it."""


class Code(enum.IntEnum):
    SUCCESS = 0
    OUT_OF_MEMORY = 2
    INSUFFICIENT_DRIVER = 35
    cudaErrorIllegalAddress = 700
    cudaErrorLaunchFailure = 719
    STREAM_CAPTURE_UNSUPPORTED = 900
    STREAM_CAPTURE_INVALIDATED = 901


CODES = {code.value: code for code in Code}


class Handle:
    def __init__(self, number: int) -> None:
        self._number = number

    def __int__(self) -> int:
        return self._number


class FakeCuda:
    sticky_error = 0
    WITHOUT_DEVICE = {  # noqa: RUF012
        *("cudaGetDevice", "cudaSetDevice", "cudaGetDeviceCount"),
        *("cudaDeviceAttr", "cudaDeviceGetAttribute", "cudaGetDeviceProperties"),
    }
    """Names whose use is no use of the current device. cudaDeviceAttr is an enum, which the fake
    lacks; the last two functions are given a device."""

    def __init__(
        self, limit: int = 1 << 30, target: tuple[int, int] = (9, 0), devices: int = 1
    ) -> None:
        self.limit, self.target, self.devices = limit, target, devices
        self.used_devices: set[int] = set()
        self.of_thread = threading.local()  # its `device` is the thread's current device
        self.allocations: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.fail_malloc = 0
        self.fail_capture = ""
        self.pending: list[Callable[[], None]] = []  # work on the stream that was not done yet
        self.streams: set[int] = set()
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.capturing: list[Callable[[], None]] | None = None
        self.error = Code.SUCCESS  # of the last call that failed; cudaGetLastError resets it
        self.undestroyed = 0  # captured graphs that were not destroyed after instantiation
        self.mallocs = self.launches = self.captures = 0
        self._handles = iter(range(1, 1 << 30))

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cuda") and self.sticky_error:
            without_result = ("cudaStreamSynchronize", "cudaGetLastError")
            result = () if name in without_result else (None,)
            return lambda *_: (CODES.get(self.sticky_error, self.sticky_error), *result)
        if name.startswith("cuda") and name not in FakeCuda.WITHOUT_DEVICE:
            self.use_device()
        return super().__getattribute__(name)

    @property
    def used(self) -> int:
        return sum(memory.nbytes for memory in self.allocations.values())

    def use_device(self) -> None:
        self.used_devices.add(getattr(self.of_thread, "device", 0))

    def on_device(self, address: int, size: int) -> bool:
        return _lies_in(self.allocations, address, size)

    def submit(self, work: Callable[[], None]) -> None:
        """Put work on the stream, or into the graph that is being captured."""
        (self.pending if self.capturing is None else self.capturing).append(work)

    def finish(self) -> None:
        assert self.capturing is None
        while self.pending:
            self.pending.pop(0)()

    def failed(self, code: Code) -> Code:
        self.error = code
        return code

    def captures_fail_in(self, name: str) -> bool:
        return self.fail_capture == name and bool(self.failed(Code.STREAM_CAPTURE_INVALIDATED))

    def refuses_allocation(self) -> bool:
        assert self.capturing is None, "an allocation would break off the capture"
        self.fail_malloc -= 1
        return self.fail_malloc == 0

    def cudaGetDeviceCount(self):
        return Code.SUCCESS, self.devices

    def cudaGetDevice(self):
        return Code.SUCCESS, getattr(self.of_thread, "device", 0)

    def cudaSetDevice(self, ordinal: int):
        assert 0 <= ordinal < self.devices
        self.of_thread.device = ordinal
        return (Code.SUCCESS,)

    def cudaDeviceGetAttribute(self, attribute: int, _device: int):
        return Code.SUCCESS, self.target[attribute - COMPUTE_CAPABILITY_MAJOR]

    def cudaGetDeviceProperties(self, _device: int):
        return Code.SUCCESS, SimpleNamespace(name=b"Fake GPU\0\0")

    def cudaGetLastError(self):
        error, self.error = self.error, Code.SUCCESS
        return (error,)

    def cudaMemGetInfo(self):
        return Code.SUCCESS, self.limit - self.used, self.limit

    def cudaMalloc(self, size: int):
        if self.refuses_allocation() or self.used + size > self.limit:
            return self.failed(Code.OUT_OF_MEMORY), None
        self.mallocs += 1
        memory = np.full(size + ALIGNMENT, 0xA5, np.uint8)  # fresh memory holds junk
        start = -memory.ctypes.data % ALIGNMENT
        memory = memory[start : start + size]
        self.allocations[memory.ctypes.data] = memory
        return Code.SUCCESS, memory.ctypes.data

    def cudaFree(self, address: int):
        self.finish()
        del self.allocations[address]
        return (Code.SUCCESS,)

    def cudaMallocHost(self, size: int):
        if self.refuses_allocation():
            return self.failed(Code.OUT_OF_MEMORY), None
        memory = np.zeros(size, np.uint8)
        self.pinned[memory.ctypes.data] = memory
        return Code.SUCCESS, memory.ctypes.data

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
        on_device, on_host = (target, source) if kind == TO_DEVICE else (source, target)
        assert self.on_device(on_device, size), "not the device's memory"
        pinned = _lies_in(self.pinned, on_host, size)
        if self.capturing is not None:
            assert kind == TO_HOST and pinned, "must be pinned"
        if kind == TO_DEVICE and not pinned:  # pageable memory is read before the call returns
            copied = ctypes.string_at(source, size)
            self.submit(lambda: (ctypes.memmove(target, copied, size), None)[1])
        else:
            self.submit(lambda: (ctypes.memmove(target, source, size), None)[1])
        if kind == TO_HOST and not pinned:  # pageable memory is filled before the call returns
            self.finish()
        return (Code.SUCCESS,)

    def cudaMemcpy2DAsync(self, *arguments: int):
        target, pitch, source, source_pitch, width, height, kind, stream = arguments
        assert stream in self.streams and kind == ON_DEVICE and width <= min(pitch, source_pitch)
        for start, row_bytes in ((target, pitch), (source, source_pitch)):
            assert height == 0 or self.on_device(start, (height - 1) * row_bytes + width)

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


def _lies_in(memory: dict[int, np.ndarray], address: int, size: int) -> bool:
    return any(
        start <= address and address + size <= start + piece.nbytes
        for start, piece in memory.items()
    )


def cuda_without_gpu(
    driver_version: int,
    count_result: tuple[int, int | None] = (Code.INSUFFICIENT_DRIVER, None),
    library_version: int = 13040,
) -> SimpleNamespace:
    return SimpleNamespace(
        cudaGetDeviceCount=lambda: count_result,
        cudaDriverGetVersion=lambda: (Code.SUCCESS, driver_version),
        cudaRuntimeGetVersion=lambda: (Code.SUCCESS, library_version),
        cudaGetDevice=lambda: (Code.SUCCESS, 0),
        cudaStreamCreateWithFlags=lambda _: (Code.INSUFFICIENT_DRIVER, None),
        cudaGetLastError=lambda: (Code.INSUFFICIENT_DRIVER,),
    )
