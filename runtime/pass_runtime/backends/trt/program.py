"""Work on the stream that is repeated: run once as it is, then captured as a CUDA graph, then replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from pass_runtime.backends.trt.cuda import Cuda
from pass_runtime.backends.trt.engine import Bound, TrtEngine

Work = Sequence[tuple[TrtEngine, Bound]]


class Program:
    """Engines on their memory, one after another, and what the host wants to know in the end."""

    def __init__(self, cuda: Cuda, work: Work, copies: Sequence[tuple[npt.NDArray[Any], int]] = ()) -> None:
        """copies: pinned arrays with the device addresses that they are filled from."""
        self._cuda, self._work, self._copies = cuda, work, copies
        self._runs = 0
        self._graph: Any = None

    def run(self) -> None:
        """Returns when the device has done it."""
        self._runs += 1
        if self._graph is None and self._runs > 1 and all(engine.capturable(bound) for engine, bound in self._work):
            self._graph = self._cuda.capture(self._enqueue)
        if self._graph is None:
            self._enqueue()
        else:
            self._cuda.launch(self._graph)
        self._cuda.synchronize()

    def _enqueue(self) -> None:
        for engine, bound in self._work:
            engine.enqueue(bound)
        for array, address in self._copies:
            self._cuda.enqueue_download(array, address)
