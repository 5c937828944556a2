"""Work on the stream that is repeated: run twice as it is, the second time captured as a CUDA graph, then replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.trt.engine import Bound, TrtEngine

Work = Sequence[tuple[TrtEngine, Bound]]


class Program:
    """Engines on their memory, one after another, and what the host wants to know in the end."""

    def __init__(self, cuda: Cuda, work: Work, copies: Sequence[tuple[npt.NDArray[Any], int]] = ()) -> None:
        """copies: pinned arrays with the device addresses that they are filled from."""
        self._cuda, self._work, self._copies = cuda, work, copies
        self._repeated = False
        self._graph: Any = None

    def run(self) -> None:
        """Returns when the device has done it."""
        if self._graph is not None:
            self._cuda.launch(self._graph)
            self._cuda.synchronize()
            return
        self._enqueue()
        self._cuda.synchronize()
        # Behind a run: a context that was given other shapes may have to do what a capture does not allow.
        if self._repeated and all(engine.capturable(bound) for engine, bound in self._work):
            self._graph = self._cuda.capture(self._enqueue)
        self._repeated = True

    def _enqueue(self) -> None:
        for engine, bound in self._work:
            engine.enqueue(bound)
        for array, address in self._copies:
            self._cuda.enqueue_download(array, address)
