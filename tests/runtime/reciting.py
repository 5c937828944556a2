"""Sessions whose model recites a text that the test chose, and functions that watch sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pass_runtime import GenerateOptions, LoadOptions
from pass_runtime.backends.base import Backend, Batch, PassResult
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.session import Trunks
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.window import RowKind, Window
from pass_runtime.decode.engine import Engine
from pass_runtime.session import Session

Script = Callable[[int], int]
"""Position in a text, from 0 -> token id."""
CERTAIN = np.float32(1e4)
"""The logit of the token to write."""


class ScriptedBackend(OrtBackend):
    """The trunk predicts `target` in root and draft rows, `drafter` in look-ahead rows."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        target: Script,
        drafter: Script,
        *,
        max_batch_size: int = 1,
    ) -> None:
        self._target, self._drafter = target, drafter
        super().__init__(bundle, manifest, "cpu", threads=1, max_batch_size=max_batch_size)

    def _open_trunks(self, _threads: int) -> Trunks | None:
        return None

    def run_trunk(self, window: Window, batch: int) -> None:
        lengths = self.buffers.read("length", (batch,), np.int64)
        for slot, length in enumerate(lengths.tolist()):
            logits = np.zeros((window.width, self.capabilities.vocab_size), np.float32)
            for i, row in enumerate(window.rows):
                script = self._drafter if row.kind is RowKind.LOOKAHEAD else self._target
                logits[i, script(length + row.depth + 1)] = CERTAIN
            self.buffers.write_row("logits", slot, logits, np.float32)

    def _run_prefill(self, _slot: int, _plan: Window, *, scored: bool) -> None:
        assert not scored


BOS, EOS = 0, 1
TWO_PASS = GenerateOptions(12, plan="two-pass", ignore_eos=True)
ENDLESS = GenerateOptions(700, plan="two-pass", ignore_eos=True)
"""More tokens than a test reads: such a request is cancelled."""


def words(position: int) -> int:
    """The usual text has no special tokens and no repeats nearby."""
    return 2 + (position * 37 + position // 7) % 317


def recited(start: int, count: int) -> list[int]:
    return [words(start + i) for i in range(count)]


def wrong(position: int) -> int:
    return 2 + (words(position) - 1) % 317


def right_unless(is_wrong: Callable[[int], bool]) -> Script:
    return lambda position: wrong(position) if is_wrong(position) else words(position)


def reciting_session(
    bundle: Path,
    target: Script = words,
    drafter: Script | None = None,
    *,
    slots: int = 1,
    max_queue: int = 1024,
    capacity: int | None = None,
) -> Session:
    """drafter: by default, all drafts are right."""
    manifest = read_manifest(bundle)
    if capacity is not None:
        manifest = manifest.model_copy(
            update={"model": manifest.model.model_copy(update={"max_capacity": capacity})}
        )
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    backend = ScriptedBackend(bundle, manifest, target, drafter or target, max_batch_size=slots)
    return Session(manifest, backend, tokenizer, options=LoadOptions(max_queue=max_queue))


class HeldSession:
    """One slot and a queue of two; each pass waits for `go`."""

    def __init__(self, bundle: Path) -> None:
        self.session = reciting_session(bundle, max_queue=2)
        self.begun, self.go = threading.Event(), threading.Event()
        self._run, self.session.backend.run = self.session.backend.run, self._wait  # type: ignore[method-assign]

    def _wait(self, batch: Batch) -> PassResult:
        self.begun.set()
        assert self.go.wait(20)
        return self._run(batch)

    def __enter__(self) -> HeldSession:
        return self

    def __exit__(self, *_error: object) -> None:
        self.go.set()
        self.session.close()


@pytest.fixture
def held(tiny_bundle: Path) -> Iterator[HeldSession]:
    with HeldSession(tiny_bundle) as held:
        yield held


def engine_of(session: Session) -> Engine:
    """Its state may be read while no request runs."""
    return session._engine


def watch_capacity(backend: Backend) -> None:
    """Every later pass must write within the KV cache, in masked slots too."""
    run = backend.run

    def check_and_run(batch):
        lengths = backend.buffers.read("length", (batch.size,), np.int64)
        width = backend.capabilities.padded_width(batch.window.width)
        assert lengths.max() + width <= backend.capacity
        return run(batch)

    backend.run = check_and_run  # type: ignore[method-assign]


def assert_idle(session: Session) -> None:
    """No request has a slot or waits; the thread of a closed session has ended."""
    worker = session._worker
    if not worker.closed:
        session.call(lambda engine: None)  # after the step in progress
    else:
        worker._thread.join(10)
        assert not worker._thread.is_alive()
    assert engine_of(session).idle


def recite(ids: Sequence[int], start: int = 1) -> Script:
    """`ids` from position `start` on, and elsewhere EOS."""
    return lambda position: ids[position - start] if 0 <= position - start < len(ids) else EOS


def windows_run(session: Session) -> list[str]:
    names: list[str] = []
    run = session.backend.run

    def record_and_run(batch):
        names.append(batch.window.name)
        return run(batch)

    session.backend.run = record_and_run  # type: ignore[method-assign]
    return names


def tokens_of(session: Session, prompt: Sequence[int], options: GenerateOptions) -> list[int]:
    return [token for piece in session.generate_ids(prompt, options) for token in piece]
