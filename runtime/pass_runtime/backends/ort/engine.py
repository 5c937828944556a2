"""What every ONNX Runtime part of the toolkit shares: devices, sessions, and named device buffers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.bundle.bindings import Slot
from pass_runtime.errors import PassError

PROVIDERS: Mapping[str, tuple[str, str]] = {
    # device -> execution provider, OrtValue memory
    "cpu": ("CPUExecutionProvider", "cpu"),
    "cuda": ("CUDAExecutionProvider", "cuda"),
}


PROVIDER_OPTIONS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "cpu": ({},),
    # Tried in this order: a graph with a node on the CPU cannot be captured. TF32 would cost fp32 its exactness.
    "cuda": ({"enable_cuda_graph": "1", "use_tf32": "0"}, {"use_tf32": "0"}),
}


def choose_device(device: str) -> str:
    """`auto` is CUDA where this onnxruntime has it, else the CPU."""
    available = ort.get_available_providers()
    if device == "auto":
        return "cuda" if PROVIDERS["cuda"][0] in available else "cpu"
    if device not in PROVIDERS:
        raise PassError(f"unknown device {device!r}: choose one of auto, {', '.join(PROVIDERS)}")
    if PROVIDERS[device][0] not in available:
        raise PassError(
            f"this onnxruntime has no {PROVIDERS[device][0]}: uninstall onnxruntime and install onnxruntime-gpu"
        )
    return device


def open_session(path: Path, device: str, threads: int = 0, *, exact: bool = False) -> ort.InferenceSession:
    """A session on `device`; `threads` 0 lets ONNX Runtime choose. On CUDA it captures graphs where it can.

    exact: multiply quantized weights in float32; ONNX Runtime's own choice also rounds activations to 8 bits.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if exact:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if device == "cuda":
        ort.preload_dlls()  # CUDA and cuDNN from the wheels that onnxruntime-gpu asks for, where they are installed
    provider, errors = PROVIDERS[device][0], []
    for settings in PROVIDER_OPTIONS[device]:
        try:
            session = ort.InferenceSession(path, options, providers=[(provider, settings)])
            break
        except Exception as error:  # onnxruntime raises bare classes of its own
            errors.append(" ".join(str(error).split()))
    else:
        raise PassError(f"onnxruntime cannot load {path}: {errors[-1]}")
    if session.get_providers()[0] != provider:
        raise PassError(f"onnxruntime could not start {provider} (is the GPU visible?); use --device cpu")
    return session


class Bound:
    """A session bound to buffers. On CUDA it is captured as a graph of its own: addresses and shapes stay the same."""

    _ids = itertools.count(1)

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding) -> None:
        self._session, self._binding = session, binding
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", str(next(self._ids)))

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding, self._options)


class Buffers:
    """Named device tensors that several graphs are bound to: the same name and shape is the same memory."""

    def __init__(self, device: str) -> None:
        self._memory = PROVIDERS[device][1]
        self._values: dict[tuple[str, tuple[int, ...]], ort.OrtValue] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> ort.OrtValue:
        key = (name, shape)
        if key not in self._values:
            self._values[key] = self.new(np.zeros(shape, dtype))
        return self._values[key]

    def at(self, slot: Slot) -> ort.OrtValue:
        """The buffer of a slot, filled if it is a constant."""
        if slot.constant is not None:
            return self.put(slot.buffer, slot.constant)
        return self.get(slot.buffer, slot.shape, slot.dtype)

    def put(self, name: str, array: npt.NDArray[Any]) -> ort.OrtValue:
        """Write `array` into its buffer."""
        value = self.get(name, array.shape, array.dtype)
        value.update_inplace(np.ascontiguousarray(array))
        return value

    def new(self, array: npt.NDArray[Any]) -> ort.OrtValue:
        """A buffer that nobody finds by name."""
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._memory, 0)
