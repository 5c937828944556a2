"""Engine calls that are repeated: they run twice, are then captured as a CUDA graph, and replayed from there on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.trt.engine import EngineCall, TrtEngine

Work = Sequence[tuple[TrtEngine, EngineCall]]


class Program:
    """Engine calls one after another, and copies of their results to the host."""

    def __init__(self, cuda: Cuda, work: Work, copies: Sequence[tuple[npt.NDArray[Any], int]] = ()) -> None:
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
