"""The part of CUDA that the backends use, through cuda-python: memory, one stream, graphs.

`api` is the module `cuda.bindings.runtime`, or a fake in tests. Its functions return a tuple that
begins with an error code.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.driver import driver_hint, driver_version
from pass_runtime.backends.memory import DeviceLost
from pass_runtime.errors import PassError

INSTALL_CUDA_PYTHON = "pip install cuda-python"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""Two values of cudaDeviceAttr: cudaDevAttrComputeCapabilityMajor and -Minor."""
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
"""Values of cudaMemcpyKind."""
NON_BLOCKING = 1
"""cudaStreamNonBlocking: the stream does not wait for CUDA's default stream."""
ALIGNMENT_BYTES = 256
"""Device memory begins at multiples of this, as engines require."""
STAGING_ALIGNMENT_BYTES = 64
"""Copies in staging memory begin at multiples of this."""
THREAD_LOCAL = 1
"""A value of cudaStreamCaptureMode: other threads may call CUDA while this thread captures."""
DEVICE_LOST_ERRORS = {
    214: "cudaErrorECCUncorrectable",
    220: "cudaErrorNvlinkUncorrectable",
    226: "cudaErrorContained",
    700: "cudaErrorIllegalAddress",
    702: "cudaErrorLaunchTimeout",
    709: "cudaErrorContextIsDestroyed",
    710: "cudaErrorAssert",
    714: "cudaErrorHardwareStackError",
    715: "cudaErrorIllegalInstruction",
    716: "cudaErrorMisalignedAddress",
    717: "cudaErrorInvalidAddressSpace",
    718: "cudaErrorInvalidPc",
    719: "cudaErrorLaunchFailure",
    721: "cudaErrorTensorMemoryLeak",
    810: "cudaErrorMpsClientTerminated",
    911: "cudaErrorExternalDevice",
}
"""Errors after which CUDA no longer works for this process. After most of them, by CUDA's
documentation, the process must end; after the others the memory, link or context is gone."""
OLD_DRIVER_ERROR = 35
"""cudaErrorInsufficientDriver: the driver is older than the library."""
NO_DEVICE_ERRORS = frozenset({3, 35, 46, 100, 101, 802, 803, 804})
"""Errors of a driver or device that is missing, too old, or in use: cudaErrorInitializationError,
InsufficientDriver, DevicesUnavailable, NoDevice, InvalidDevice, SystemNotReady,
SystemDriverMismatch, CompatNotSupportedOnDevice."""


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU. target: its compute capability, as in `sm89`. free, total: bytes of its memory."""

    name: str
    target: str
    free: int
    total: int


def import_api() -> Any:
    """Import cuda.bindings.runtime. Raises PassError with the command that installs it."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise PassError(
            f"cuda-python cannot be imported ({error}); run: {INSTALL_CUDA_PYTHON}"
        ) from None
    return runtime


def require_device(api: Any, ordinal: int) -> None:
    """Raise PassError if this process sees no GPU with the number `ordinal`."""
    count = int(unwrap(api.cudaGetDeviceCount(), "cudaGetDeviceCount", api))
    if ordinal >= count:
        seen = {0: "no GPU is visible", 1: "1 GPU is visible, number 0"}.get(
            count, f"{count} GPUs are visible, numbers 0 to {count - 1}"
        )
        raise PassError(
            f"there is no GPU {ordinal}: {seen} (see nvidia-smi, and CUDA_VISIBLE_DEVICES)"
        )


@contextmanager
def on_device(api: Any, ordinal: int) -> Iterator[None]:
    """Make GPU `ordinal` the current device of the calling thread while the block runs. Every
    thread has a current device, at first GPU 0. Errors are ignored: later calls report them."""
    code, previous = api.cudaGetDevice()
    if int(code) == 0 and previous == ordinal:
        yield
        return
    api.cudaSetDevice(ordinal)
    try:
        yield
    finally:
        if int(code) == 0:
            api.cudaSetDevice(previous)


def find_device(api: Any | None = None, ordinal: int = 0) -> DeviceInfo | None:
    """Return GPU `ordinal`; None if the driver, the GPU or cuda-python is missing."""
    try:
        api = api or import_api()
        if unwrap(api.cudaGetDeviceCount()) <= ordinal:
            return None
        major, minor = (
            unwrap(api.cudaDeviceGetAttribute(_attribute(api, each), ordinal))
            for each in (CAPABILITY_MAJOR, CAPABILITY_MINOR)
        )
        name = unwrap(api.cudaGetDeviceProperties(ordinal)).name
        with on_device(api, ordinal):
            free, total = unwrap(api.cudaMemGetInfo())
    except PassError:
        return None
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return DeviceInfo(text.rstrip("\0"), f"sm{major}{minor}", free, total)


def why_no_device(api: Any | None = None) -> str:
    """Return why `find_device` found no GPU: what is missing or too old, and what to do."""
    try:
        api = api or import_api()
        count = unwrap(api.cudaGetDeviceCount(), "cudaGetDeviceCount", api)
    except PassError as error:
        return str(error)
    if not count:
        return (
            "CUDA sees no GPU; is it visible to nvidia-smi, and not hidden by CUDA_VISIBLE_DEVICES?"
        )
    return f"CUDA sees {count} GPUs, but cannot read their properties; update the driver"


def has_driver(api: Any | None = None) -> bool:
    """Whether there is an NVIDIA driver, even one that is too old for cuda-python."""
    try:
        return bool(driver_version(api or import_api()))
    except PassError:
        return False


def _attribute(api: Any, number: int) -> Any:
    """Return the member `number` of cudaDeviceAttr; in a fake without that enum, `number`."""
    enum = getattr(api, "cudaDeviceAttr", None)
    return number if enum is None else enum(number)


def unwrap(result: tuple[Any, ...], name: str = "CUDA", api: Any | None = None) -> Any:
    """Return the values after the error code of `result`. Raises PassError if the code is an error,
    and DeviceLost if later calls would fail too. name: the function, for the message. api: asked
    for the versions to report if the driver is too old."""
    code, *values = result
    if int(code) in DEVICE_LOST_ERRORS:
        raise DeviceLost(
            f"the GPU works no more for this process (CUDA error {int(code)}, "
            f"{DEVICE_LOST_ERRORS[int(code)]}, {name}); restart the process"
        )
    if int(code) != 0:
        hint = "; is the GPU visible to nvidia-smi?" if int(code) in NO_DEVICE_ERRORS else ""
        if int(code) == OLD_DRIVER_ERROR:
            hint = driver_hint(api)
        raise PassError(
            f"{name} failed with CUDA error {int(code)} ({getattr(code, 'name', code)}){hint}"
        )
    return values[0] if len(values) == 1 else tuple(values)


@dataclass
class Cuda:
    """The memory of one GPU (a `pass_runtime.backends.memory.Memory`), with one stream and the
    graphs captured on it. A thread must hold `for_this_thread` to call the other methods.

    ordinal: the number of the GPU.
    staging_bytes: the size of the staging memory, pinned host memory that copies go through.
    Uploads that fit it return at once, and only later work on this stream is sure to see them. So
    staging_bytes must be 0 if other streams use the memory: uploads then return when the device has
    done them.
    """

    api: Any
    staging_bytes: int = 0
    ordinal: int = 0
    stream: int | None = None
    _device_blocks: list[int] = field(default_factory=list)
    _host_blocks: list[int] = field(default_factory=list)
    _graphs: list[Any] = field(default_factory=list)
    _process: int = field(default_factory=os.getpid)
    failure: DeviceLost | None = None
    _capturing: bool = False
    _staging: npt.NDArray[np.uint8] | None = None
    _in_flight: int = 0
    """The bytes at the beginning of the staging memory that the device may not have read yet."""

    def __post_init__(self) -> None:
        if self.ordinal:
            require_device(self.api, self.ordinal)
        with self.for_this_thread():
            # TensorRT takes the stream as an integer.
            self.stream = int(self._call("cudaStreamCreateWithFlags", NON_BLOCKING))

    def for_this_thread(self) -> AbstractContextManager[None]:
        """A context that makes this device current for the calling thread."""
        return on_device(self.api, self.ordinal)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made this object."""
        return os.getpid() != self._process

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the CUDA function `name` and return its values. If it fails, clear CUDA's record of
        the last error, because engines would take it for the error of a later launch."""
        try:
            return self._check(getattr(self.api, name)(*arguments), name)
        except DeviceLost:
            raise
        except PassError:
            self.api.cudaGetLastError()
            raise

    def _check(self, result: tuple[Any, ...], name: str) -> Any:
        """Return what `unwrap` returns, and remember that the device is lost if it is."""
        try:
            return unwrap(result, name, self.api)
        except DeviceLost as error:
            self.failure = self.failure or error
            raise

    def check_device(self) -> None:
        """Raise DeviceLost if an engine failed because the device is lost."""
        self.why()

    def why(self) -> str:
        """Return the text of the CUDA error after which an engine failed, and clear the error; ""
        if there is none. Raises DeviceLost if the device is lost."""
        results = [("cudaGetLastError", self.api.cudaGetLastError())]
        if not self._capturing:  # Waiting during a capture would be another error.
            results.append(("cudaStreamSynchronize", self.api.cudaStreamSynchronize(self.stream)))
            self.api.cudaGetLastError()
        for name, result in results:
            if int(result[0]) in DEVICE_LOST_ERRORS:
                self._check(result, name)
        codes = [code for _, (code, *_) in results if int(code)]
        return (
            f"CUDA error {int(codes[0])} ({getattr(codes[0], 'name', codes[0])})" if codes else ""
        )

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes, rounded up to ALIGNMENT_BYTES. All are zero."""
        size = -(-max(size, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        try:
            address = int(self._call("cudaMalloc", size))
        except DeviceLost:
            raise
        except PassError as error:
            free, total = self._call("cudaMemGetInfo")
            raise PassError(
                f"the GPU has no {size / 2**20:.0f} MiB left ({free / 2**20:.0f} of "
                f"{total / 2**20:.0f} MiB free; {error}); stop other programs on it, lower "
                "--capacity, or build engines with a lower --max-seq-len"
            ) from None
        self._device_blocks.append(address)
        self._call("cudaMemsetAsync", address, 0, size, self.stream)
        self.synchronize()
        return address

    def free(self, address: int) -> None:
        """Free the block at `address` after the work that is on the stream."""
        self.synchronize()
        self._device_blocks.remove(address)
        self._call("cudaFree", address)

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array in pinned (page-locked) host memory, which the device can access."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        try:
            address = int(self._call("cudaMallocHost", size))
        except DeviceLost:
            raise
        except PassError as error:
            raise PassError(
                f"the host has no {-(-size // 2**20)} MiB left to pin for the GPU ({error}); "
                "stop other programs on it, or use a lower --max-batch-size"
            ) from None
        self._host_blocks.append(address)
        memory = (ctypes.c_ubyte * size).from_address(address)
        array: npt.NDArray[Any] = np.ctypeslib.as_array(memory).view(dtype).reshape(shape)
        return array

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy a contiguous host array to the device, in the order of the stream. `array` may
        change as soon as this returns."""
        if not array.nbytes:
            return
        staged = self._stage(array.nbytes)
        if staged is not None:
            ctypes.memmove(staged, array.ctypes.data, array.nbytes)
        source = array.ctypes.data if staged is None else staged
        self._call("cudaMemcpyAsync", address, source, array.nbytes, TO_DEVICE, self.stream)
        if staged is None:
            self.synchronize()

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        """Fill a host array from the device, after the work that is on the stream."""
        staged = self._stage(array.nbytes)
        target = array.ctypes.data if staged is None else staged
        self._call("cudaMemcpyAsync", target, address, array.nbytes, TO_HOST, self.stream)
        self.synchronize()
        if staged is not None:
            ctypes.memmove(array.ctypes.data, staged, array.nbytes)

    def _stage(self, size: int) -> int | None:
        """Return the address of `size` bytes of staging memory that no copy in progress uses; None
        if the staging memory is smaller."""
        if size > self.staging_bytes:
            return None
        if self._staging is None:
            self._staging = self.pinned((self.staging_bytes,), np.uint8)
        if self._in_flight + size > self.staging_bytes:
            self.synchronize()
        address = int(self._staging.ctypes.data) + self._in_flight
        self._in_flight += -(-size // STAGING_ALIGNMENT_BYTES) * STAGING_ALIGNMENT_BYTES
        return address

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, rows: int
    ) -> None:
        """Copy rows on the device (see `Memory.copy_rows`)."""
        addresses = target, target_pitch, source, source_pitch
        self._call("cudaMemcpy2DAsync", *addresses, size, rows, ON_DEVICE, self.stream)
        self.synchronize()

    def enqueue_download(self, array: npt.NDArray[Any], address: int) -> None:
        """Put a copy from the device to a host array on the stream. The array is filled when
        `synchronize` returns. It must be pinned if the copy is captured."""
        self._call(
            "cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, TO_HOST, self.stream
        )

    def synchronize(self) -> None:
        """Wait until the device has done all work on the stream."""
        self._call("cudaStreamSynchronize", self.stream)
        self._in_flight = 0

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """Capture what `enqueue` puts on the stream, and return the graph for `launch`. Raises
        PassError if it cannot be captured; the stream can be used afterwards in any case."""
        self._call("cudaStreamBeginCapture", self.stream, THREAD_LOCAL)
        self._capturing = True
        try:
            enqueue()
        except BaseException:
            # The end of a failed capture may be an error too; the first error is the one to raise.
            _, graph = self.api.cudaStreamEndCapture(self.stream)
            if graph is not None:
                self.api.cudaGraphDestroy(graph)
            self.api.cudaGetLastError()
            raise
        finally:
            self._capturing = False
        graph = self._call("cudaStreamEndCapture", self.stream)
        try:
            executable = self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)
        self._graphs.append(executable)
        return executable

    def launch(self, executable: Any) -> None:
        """Put a captured graph on the stream."""
        self._call("cudaGraphLaunch", executable, self.stream)

    def close(self) -> None:
        """Free everything. Do nothing if it is closed, or in a fork, where CUDA does not work."""
        if self.stream is None or self.forked:
            return
        # The memory of a lost device is freed when the process ends.
        with suppress(DeviceLost), self.for_this_thread():
            self._release()
        self.stream = None

    def _release(self) -> None:
        self.synchronize()
        for release, held in (
            ("cudaGraphExecDestroy", self._graphs),
            ("cudaFree", self._device_blocks),
            ("cudaFreeHost", self._host_blocks),
        ):
            while held:
                self._call(release, held.pop())
        self._call("cudaStreamDestroy", self.stream)
