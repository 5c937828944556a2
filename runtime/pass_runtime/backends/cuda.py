"""CUDA through cuda-python: memory, one stream, graphs."""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.memory import DeviceLost
from pass_runtime.errors import PassError

INSTALL_CUDA_PYTHON = "pip install cuda-python"
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
"""cudaDevAttrComputeCapabilityMajor and -Minor."""
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3
"""cudaMemcpyKind."""
NON_BLOCKING = 1
"""cudaStreamNonBlocking: it does not wait for CUDA's default stream."""
ALIGNMENT_BYTES = 256
"""Of device memory, as engines require."""
STAGING_ALIGNMENT_BYTES = 64
THREAD_LOCAL = 1
"""cudaStreamCaptureMode: other threads may call CUDA during a capture."""
DEVICE_LOST_ERRORS = frozenset({214, 220, 226, *range(714, 720), 700, 702, 709, 710, 721, 810, 911})
"""cudaErrorIllegalAddress (700), LaunchFailure (719) and others after which every call fails: ECC,
NVLink, time-out, destroyed context, assertion, hardware stack, instruction, alignment, address
space, program counter, tensor memory, MPS, external device."""
OLD_DRIVER_ERROR = 35
"""cudaErrorInsufficientDriver."""
NO_DEVICE_ERRORS = frozenset({3, 35, 46, 100, 101, 802, 803, 804})
"""A driver or device is missing, too old, or in use: cudaErrorInitializationError,
InsufficientDriver, DevicesUnavailable, NoDevice, InvalidDevice, SystemNotReady,
SystemDriverMismatch, CompatNotSupportedOnDevice."""


@dataclass(frozen=True)
class DeviceInfo:
    """target: the compute capability, as in `sm89`. free, total: bytes."""

    name: str
    target: str
    free: int
    total: int


def import_api() -> Any:
    """Raises PassError with the command that installs cuda-python."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise PassError(
            f"cuda-python cannot be imported ({error}); run: {INSTALL_CUDA_PYTHON}"
        ) from None
    return runtime


def require_device(api: Any, ordinal: int) -> None:
    """Raise PassError if this process sees no such GPU."""
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
    """Make GPU `ordinal` the thread's current device while the block runs."""
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
    """Return GPU `ordinal`, or None if the driver, the GPU or cuda-python is missing."""
    try:
        api = api or import_api()
        if unwrap(api.cudaGetDeviceCount()) <= ordinal:
            return None
        attribute = getattr(api, "cudaDeviceAttr", int)
        major, minor = (
            unwrap(api.cudaDeviceGetAttribute(attribute(each), ordinal))
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
    """Say what is missing or too old, and what to do."""
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


def log_level_without_gpu() -> int:
    """A warning with a driver, even one that is too old: the user probably expects the GPU."""
    with suppress(PassError):
        if driver_version(import_api()):
            return logging.WARNING
    return logging.INFO


def unwrap(result: tuple[Any, ...], name: str = "CUDA", api: Any | None = None) -> Any:
    """Return the values after the error code of `result`. Raises PassError, or DeviceLost if
    later calls would fail too."""
    code, *values = result
    if int(code) in DEVICE_LOST_ERRORS:
        raise DeviceLost(
            f"the GPU works no more for this process (CUDA error {int(code)}, "
            f"{getattr(code, 'name', 'device lost')}, {name}); restart the process"
        )
    if int(code) != 0:
        hint = "; is the GPU visible to nvidia-smi?" if int(code) in NO_DEVICE_ERRORS else ""
        if int(code) == OLD_DRIVER_ERROR:
            hint = driver_hint(api)
        raise PassError(
            f"{name} failed with CUDA error {int(code)} ({getattr(code, 'name', code)}){hint}"
        )
    return values[0] if len(values) == 1 else tuple(values)


MIN_DRIVER_BRANCH = {12: 525, 13: 580}
"""CUDA's major version -> the first branch of NVIDIA's Linux driver that runs it."""


def driver_hint(api: Any | None) -> str:
    """End an error message: what to do about the driver, and the CUDA versions."""
    driver, library = driver_version(api), _cuda_version(api, "cudaRuntimeGetVersion")
    if driver == 0:
        return "; there is no NVIDIA driver here: is the GPU visible to nvidia-smi?"
    if driver is None or library is None:
        return (
            "; the driver is older than the CUDA library: update it (nvidia-smi shows the "
            "CUDA version that it runs)"
        )
    major = library // 1000
    newer = f", {MIN_DRIVER_BRANCH[major]} or newer" if major in MIN_DRIVER_BRANCH else ""
    return (
        f"; the driver is older than the CUDA library: it runs CUDA up to {_dotted(driver)}, and "
        f"the library is CUDA {_dotted(library)}; update to a driver for CUDA {major}{newer} "
        "(nvidia-smi shows which is installed)"
    )


def driver_version(api: Any | None) -> int | None:
    """Return 13040 for CUDA 13.4; 0 without a driver, None if unknown."""
    return _cuda_version(api, "cudaDriverGetVersion")


def _cuda_version(api: Any | None, name: str) -> int | None:
    code, *values = getattr(api, name)() if hasattr(api, name) else (1,)
    return int(values[0]) if int(code) == 0 else None


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


@dataclass
class Cuda:
    """The memory of one GPU, with one stream and its captured graphs. A thread must hold
    `for_this_thread` to call the other methods.

    staging_bytes: pinned host memory for copies. Uploads that fit return at once, and only later
    work on this stream sees them: 0 if other streams use the memory.
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
    """Staging bytes that the device may not have read yet."""

    def __post_init__(self) -> None:
        if self.ordinal:
            require_device(self.api, self.ordinal)
        with self.for_this_thread():
            # TensorRT takes the stream as an integer.
            self.stream = int(self._call("cudaStreamCreateWithFlags", NON_BLOCKING))

    def for_this_thread(self) -> AbstractContextManager[None]:
        """Make the device current for the calling thread."""
        return on_device(self.api, self.ordinal)

    @property
    def forked(self) -> bool:
        return os.getpid() != self._process

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return self._check(getattr(self.api, name)(*arguments), name)
        except DeviceLost:
            raise
        except PassError:
            self.api.cudaGetLastError()
            raise

    def _check(self, result: tuple[Any, ...], name: str) -> Any:
        try:
            return unwrap(result, name, self.api)
        except DeviceLost as error:
            self.failure = self.failure or error
            raise

    def check_device(self) -> None:
        self.why()

    def why(self) -> str:
        """Return and clear the CUDA error after which an engine failed; "" without. Raises
        DeviceLost."""
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
        """Return the address of `size` bytes, rounded up to ALIGNMENT_BYTES."""
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
        """Free the block after the work on the stream."""
        self.synchronize()
        self._device_blocks.remove(address)
        self._call("cudaFree", address)

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array in page-locked host memory, which the device can access."""
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
        """Copy a contiguous host array, in the order of the stream."""
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
        """Fill a host array after the work on the stream."""
        staged = self._stage(array.nbytes)
        target = array.ctypes.data if staged is None else staged
        self._call("cudaMemcpyAsync", target, address, array.nbytes, TO_HOST, self.stream)
        self.synchronize()
        if staged is not None:
            ctypes.memmove(array.ctypes.data, staged, array.nbytes)

    def _stage(self, size: int) -> int | None:
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
        """See `Memory.copy_rows`."""
        addresses = target, target_pitch, source, source_pitch
        self._call("cudaMemcpy2DAsync", *addresses, size, rows, ON_DEVICE, self.stream)
        self.synchronize()

    def enqueue_download(self, array: npt.NDArray[Any], address: int) -> None:
        self._call(
            "cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, TO_HOST, self.stream
        )

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)
        self._in_flight = 0

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """Return the graph of what `enqueue` puts on the stream. Raises PassError if it cannot
        be captured; the stream stays usable."""
        self._call("cudaStreamBeginCapture", self.stream, THREAD_LOCAL)
        self._capturing = True
        try:
            enqueue()
        except BaseException:
            # The end of a failed capture may fail too: the first error is the one to raise.
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
        self._call("cudaGraphLaunch", executable, self.stream)

    def close(self) -> None:
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
