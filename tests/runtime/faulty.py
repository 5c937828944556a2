"""A backend and a memory that fail at a chosen call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import onnxruntime as ort
from tokenizers import Tokenizer

from pass_runtime.backends.base import Backend
from pass_runtime.backends.memory import HostMemory
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.session import Trunks
from pass_runtime.bundle.manifest import TOKENIZER_FILE
from pass_runtime.bundle.read import read_manifest
from pass_runtime.options import LoadOptions
from pass_runtime.session import Session

T = TypeVar("T")
MOMENTS = ("prefill", "run_trunk", "run_tail")
"""The methods of a `FaultyBackend` that can have a fuse."""


class Fuse:
    """Raises `error` at call number `at` of `count`, from 1; never if `at` is 0."""

    def __init__(self, error: Exception, at: int = 0) -> None:
        self.error, self.at, self.calls, self.blown = error, at, 0, False

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.blown = True
            raise self.error.with_traceback(None)  # it would keep sessions of earlier tests


class FaultyMemory(HostMemory):
    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self.fuse = fuse

    def allocate(self, size: int) -> int:
        self.fuse.count()
        return super().allocate(size)


class FaultyBackend(OrtBackend):
    _opened: dict[tuple[Path, int], tuple[Trunks, dict[str, ort.InferenceSession]]] = {}  # noqa: RUF012

    def __init__(self, bundle: Path, *, slots: int = 2, memory: HostMemory | None = None) -> None:
        self.fuses: dict[str, Fuse] = {}
        self.late = False
        options = {"threads": 1, "max_batch_size": slots, "memory": memory}
        super().__init__(bundle, read_manifest(bundle), "cpu", **options)
        self._tails = self._opened[bundle, slots][1]

    def _open_trunks(self, threads: int) -> Trunks:
        key = self.bundle, self.capabilities.slots  # the number of slots decides which trunk runs
        if key not in self._opened:
            self._opened[key] = super()._open_trunks(threads), {}
        return self._opened[key][0]

    def _fail_around(self, name: str, work: Callable[[], T]) -> T:
        fuse = self.fuses.get(name)
        if fuse is not None and not self.late:
            fuse.count()
        result = work()
        if fuse is not None and self.late:
            fuse.count()
        return result

    def prefill(self, *arguments):
        return self._fail_around("prefill", lambda: super(FaultyBackend, self).prefill(*arguments))

    def run_trunk(self, *arguments):
        self._fail_around("run_trunk", lambda: super(FaultyBackend, self).run_trunk(*arguments))

    def run_tail(self, *arguments):
        self._fail_around("run_tail", lambda: super(FaultyBackend, self).run_tail(*arguments))


def session_of(backend: Backend, prefix_cache: bool = True) -> Session:
    tokenizer = Tokenizer.from_file(str(backend.bundle / TOKENIZER_FILE))
    options = LoadOptions(prefix_cache=prefix_cache)
    return Session(backend.manifest, backend, tokenizer, options=options)
