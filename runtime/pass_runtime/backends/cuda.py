"""CUDA as far as the backends need it, through NVIDIA's cuda-python: memory, one stream, captured graphs.

`api` is the module `cuda.bindings.runtime`, or in tests something with the same few functions. Every function of it
returns a tuple that begins with an error code.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.errors import PassError

INSTALL = "pip install cuda-python"
MAJOR, MINOR = 75, 76
"""cudaDevAttrComputeCapabilityMajor and -Minor."""
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
"""cudaMemcpyKind."""
NON_BLOCKING = 1
ALIGNMENT = 256
"""Bytes; what engines want of addresses."""
THREAD_LOCAL = 1
"""cudaStreamCaptureMode: other threads may call CUDA while this one captures."""


@dataclass(frozen=True)
class DeviceInfo:
    """Of GPU 0. target: its compute capability, as `sm89`. Memory in bytes."""

    name: str
    target: str
    free: int
    total: int


def import_api() -> Any:
    """cuda.bindings.runtime; PassError with the command that installs it, and disturbs nothing else."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise PassError(f"cuda-python cannot be imported ({error}); run: {INSTALL}") from None
    return runtime


def find_device(api: Any | None = None) -> DeviceInfo | None:
    """GPU 0, None where there is none (no driver, no device, no cuda-python)."""
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
    """The values behind the error code; PassError where it is one."""
    code, *values = result
    if int(code) != 0:
        raise PassError(f"CUDA error {int(code)} ({getattr(code, 'name', code)}); is the GPU visible to nvidia-smi?")
    return values[0] if len(values) == 1 else tuple(values)


@dataclass
class Cuda:
    """One stream of one device, and everything that was allocated on it (`pass_runtime.backends.memory.Memory`).
    `close` gives all of it back. What other streams may read is done when a method returns."""

    api: Any
    stream: int | None = None
    _device: list[int] = field(default_factory=list)
    _host: list[int] = field(default_factory=list)
    _graphs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = int(call(self.api.cudaStreamCreateWithFlags(NON_BLOCKING)))  # TensorRT takes a number

    def allocate(self, size: int) -> int:
        """Address of `size` bytes on the device, zeroed, with zeros up to a multiple of ALIGNMENT behind them."""
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        try:
            address = int(call(self.api.cudaMalloc(size)))
        except PassError:
            self.api.cudaGetLastError()  # or whoever asks after the next launch is told of this
            free, total = call(self.api.cudaMemGetInfo())
            raise PassError(
                f"the GPU has no {size / 2**20:.0f} MiB left ({free / 2**20:.0f} of {total / 2**20:.0f} MiB free); "
                "stop other programs on it, or build engines with a lower --max-seq-len"
            ) from None
        self._device.append(address)
        call(self.api.cudaMemsetAsync(address, 0, size, self.stream))
        self.synchronize()
        return address

    def free(self, address: int) -> None:
        """Once the device has done what it was asked."""
        self.synchronize()
        self._device.remove(address)
        call(self.api.cudaFree(address))

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Host memory that the device copies to without staging."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        try:
            address = int(call(self.api.cudaMallocHost(size)))
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
        """Copy a contiguous host array to the device, behind what the stream has to do; `array` may change at once."""
        if array.nbytes:
            call(self.api.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, TO_DEVICE, self.stream))
            self.synchronize()

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        """Fill a host array behind what the stream has to do."""
        self.enqueue_download(array, address)
        self.synchronize()

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, size: int, rows: int) -> None:
        """Copy `rows` rows of `size` bytes on the device, which begin `pitch` bytes apart."""
        copy = self.api.cudaMemcpy2DAsync
        call(copy(target, pitch, source, source_pitch, size, rows, ON_DEVICE, self.stream))
        self.synchronize()

    def enqueue_download(self, array: npt.NDArray[Any], address: int) -> None:
        """Copy to a host array behind what the stream has to do; valid after `synchronize` (capturable if pinned)."""
        call(self.api.cudaMemcpyAsync(array.ctypes.data, address, array.nbytes, TO_HOST, self.stream))

    def synchronize(self) -> None:
        call(self.api.cudaStreamSynchronize(self.stream))

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """What `enqueue` puts on the stream, as a graph to `launch`. Nothing of it is run."""
        call(self.api.cudaStreamBeginCapture(self.stream, THREAD_LOCAL))
        try:
            enqueue()
        except BaseException:
            _, graph = self.api.cudaStreamEndCapture(self.stream)  # it may have failed too: the first error counts
            if graph is not None:
                self.api.cudaGraphDestroy(graph)
            raise
        graph = call(self.api.cudaStreamEndCapture(self.stream))
        try:
            executable = call(self.api.cudaGraphInstantiate(graph, 0))
        finally:
            call(self.api.cudaGraphDestroy(graph))
        self._graphs.append(executable)
        return executable

    def launch(self, executable: Any) -> None:
        call(self.api.cudaGraphLaunch(executable, self.stream))

    def close(self) -> None:
        """Free everything; harmless when repeated."""
        if self.stream is None:
            return
        self.synchronize()
        for release, held in (
            (self.api.cudaGraphExecDestroy, self._graphs),
            (self.api.cudaFree, self._device),
            (self.api.cudaFreeHost, self._host),
        ):
            while held:
                call(release(held.pop()))
        call(self.api.cudaStreamDestroy(self.stream))
        self.stream = None
