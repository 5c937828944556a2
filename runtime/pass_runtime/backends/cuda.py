"""CUDA as far as the backends need it, through NVIDIA's cuda-python: memory, one stream, captured graphs.

`api` is the module `cuda.bindings.runtime`, or in tests something with the same few functions. Every function of it
returns a tuple that begins with an error code.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.memory import DeviceLost
from pass_runtime.errors import PassError

INSTALL = "pip install cuda-python"
MAJOR, MINOR = 75, 76
"""cudaDevAttrComputeCapabilityMajor and -Minor."""
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
"""cudaMemcpyKind."""
NON_BLOCKING = 1
ALIGNMENT = 256
"""Addresses are multiples of this many bytes, as engines require."""
THREAD_LOCAL = 1
"""cudaStreamCaptureMode: other threads may call CUDA while this one captures."""
LOST = frozenset({214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 911})
"""Errors after which CUDA does no more work for a process, by its documentation: an uncorrectable memory or link error,
a contained error, an illegal address, a launch timeout, a destroyed context, an assert, a hardware exception (stack,
instruction, alignment, address space, program counter, launch failure), a tensor memory leak, another device's
error."""


@dataclass(frozen=True)
class DeviceInfo:
    """GPU 0. target: its compute capability, as `sm89`. free and total: its memory in bytes."""

    name: str
    target: str
    free: int
    total: int


def import_api() -> Any:
    """The module cuda.bindings.runtime; PassError with the command that installs it."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise PassError(f"cuda-python cannot be imported ({error}); run: {INSTALL}") from None
    return runtime


def find_device(api: Any | None = None) -> DeviceInfo | None:
    """GPU 0; None where the driver, the device or cuda-python is missing."""
    try:
        api = api or import_api()
        if not call(api.cudaGetDeviceCount()):
            return None
        major, minor = (call(api.cudaDeviceGetAttribute(_attribute(api, number), 0)) for number in (MAJOR, MINOR))
        name = call(api.cudaGetDeviceProperties(0)).name
        free, total = call(api.cudaMemGetInfo())
    except PassError:
        return None
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return DeviceInfo(text.rstrip("\0"), f"sm{major}{minor}", free, total)


def _attribute(api: Any, number: int) -> Any:
    kind = getattr(api, "cudaDeviceAttr", None)
    return number if kind is None else kind(number)


def call(result: tuple[Any, ...]) -> Any:
    """The values after the error code. An error is a PassError, or DeviceLost where all later calls will fail too."""
    code, *values = result
    if int(code) in LOST:
        name = getattr(code, "name", code)
        raise DeviceLost(f"the GPU works no more for this process (CUDA error {int(code)}, {name}); start it again")
    if int(code) != 0:
        raise PassError(f"CUDA error {int(code)} ({getattr(code, 'name', code)}); is the GPU visible to nvidia-smi?")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass
class Cuda:
    """The memory of one device (`pass_runtime.backends.memory.Memory`), with one stream and the graphs captured on it.

    Methods that write memory return when the device is done, so that other streams can read it. `close` frees it all.
    """

    api: Any
    stream: int | None = None
    _device: list[int] = field(default_factory=list)
    _host: list[int] = field(default_factory=list)
    _graphs: list[Any] = field(default_factory=list)
    _process: int = field(default_factory=os.getpid)
    failure: DeviceLost | None = None

    def __post_init__(self) -> None:
        self.stream = int(self._call(self.api.cudaStreamCreateWithFlags(NON_BLOCKING)))  # TensorRT takes an integer.

    @property
    def forked(self) -> bool:
        """Whether this is a fork of the process that made this object."""
        return os.getpid() != self._process

    def _call(self, result: tuple[Any, ...]) -> Any:
        try:
            return call(result)
        except DeviceLost as error:
            self.failure = self.failure or error
            raise

    def check_device(self) -> None:
        """Raise DeviceLost where a lost device is why an engine failed without saying so."""
        for (code,) in (self.api.cudaStreamSynchronize(self.stream), self.api.cudaGetLastError()):
            if int(code) in LOST:
                self._call((code,))

    def allocate(self, size: int) -> int:
        """Address of `size` zeroed bytes on the device, padded with zeros to a multiple of ALIGNMENT."""
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        try:
            address = int(self._call(self.api.cudaMalloc(size)))
        except DeviceLost:
            raise
        except PassError:
            self.api.cudaGetLastError()  # Clears the error, which the check after the next launch would report.
            free, total = self._call(self.api.cudaMemGetInfo())
            raise PassError(
                f"the GPU has no {size / 2**20:.0f} MiB left ({free / 2**20:.0f} of {total / 2**20:.0f} MiB free); "
                "stop other programs on it, or build engines with a lower --max-seq-len"
            ) from None
        self._device.append(address)
        self._call(self.api.cudaMemsetAsync(address, 0, size, self.stream))
        self.synchronize()
        return address

    def free(self, address: int) -> None:
        """Free `address` when the device has finished its work."""
        self.synchronize()
        self._device.remove(address)
        self._call(self.api.cudaFree(address))

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Page-locked host memory, which the device can copy to directly."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        try:
            address = int(self._call(self.api.cudaMallocHost(size)))
        except DeviceLost:
            raise
        except PassError:
            self.api.cudaGetLastError()  # as in `allocate`
            raise PassError(
                f"the host has no {-(-size // 2**20)} MiB left to pin for the GPU; "
                "stop other programs on it, or use a lower --max-batch-size"
            ) from None
        self._host.append(address)
        memory = (ctypes.c_ubyte * size).from_address(address)
        array: npt.NDArray[Any] = np.ctypeslib.as_array(memory).view(dtype).reshape(shape)
        return array

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy a contiguous host array to the device, in the order of the stream. `array` may change afterwards."""
        if array.nbytes:
            self._call(self.api.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, TO_DEVICE, self.stream))
            self.synchronize()

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        """Fill a host array from the device, in the order of the stream."""
        self.enqueue_download(array, address)
        self.synchronize()

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, size: int, rows: int) -> None:
        """Copy `rows` rows of `size` bytes on the device. They begin `pitch` and `source_pitch` bytes apart."""
        copy = self.api.cudaMemcpy2DAsync
        self._call(copy(target, pitch, source, source_pitch, size, rows, ON_DEVICE, self.stream))
        self.synchronize()

    def enqueue_download(self, array: npt.NDArray[Any], address: int) -> None:
        """Put a copy to a host array on the stream. The array is valid after `synchronize`; a graph needs a pinned
        one."""
        self._call(self.api.cudaMemcpyAsync(array.ctypes.data, address, array.nbytes, TO_HOST, self.stream))

    def synchronize(self) -> None:
        self._call(self.api.cudaStreamSynchronize(self.stream))

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """A graph to `launch` of what `enqueue` puts on the stream. Capturing runs nothing."""
        self._call(self.api.cudaStreamBeginCapture(self.stream, THREAD_LOCAL))
        try:
            enqueue()
        except BaseException:
            _, graph = self.api.cudaStreamEndCapture(self.stream)  # It may fail too; the first error is raised.
            if graph is not None:
                self.api.cudaGraphDestroy(graph)
            raise
        graph = self._call(self.api.cudaStreamEndCapture(self.stream))
        try:
            executable = self._call(self.api.cudaGraphInstantiate(graph, 0))
        finally:
            self._call(self.api.cudaGraphDestroy(graph))
        self._graphs.append(executable)
        return executable

    def launch(self, executable: Any) -> None:
        self._call(self.api.cudaGraphLaunch(executable, self.stream))

    def close(self) -> None:
        """Free everything. Repeated calls do nothing, nor do calls in a forked process, where CUDA does not work."""
        if self.stream is None or self.forked:
            return
        with suppress(DeviceLost):  # The memory of a lost device is freed when the process ends.
            self._release()
        self.stream = None

    def _release(self) -> None:
        self.synchronize()
        for release, held in (
            (self.api.cudaGraphExecDestroy, self._graphs),
            (self.api.cudaFree, self._device),
            (self.api.cudaFreeHost, self._host),
        ):
            while held:
                self._call(release(held.pop()))
        self._call(self.api.cudaStreamDestroy(self.stream))
