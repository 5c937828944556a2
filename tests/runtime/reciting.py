"""Sessions whose model recites a text that the test chose (scripted.py), with the tails and the
tokenizer of a tiny bundle, and functions that watch sessions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from scripted import Script, ScriptedBackend
from tokenizers import Tokenizer

from pass_runtime import GenerateOptions
from pass_runtime.backends.base import Backend, PassKind
from pass_runtime.bundle.read import read_manifest
from pass_runtime.decode.runner import Runner
from pass_runtime.session import Session

BOS, EOS = 0, 1
TWO_PASS = GenerateOptions(12, plan="two-pass", ignore_eos=True)
ENDLESS = GenerateOptions(700, plan="two-pass", ignore_eos=True)
"""More tokens than a test reads: such a request is cancelled."""


def words(position: int) -> int:
    """Return the token at a position of the usual text, which has no special tokens and no repeats
    nearby."""
    return 2 + (position * 37 + position // 7) % 317


def recited(start: int, count: int) -> list[int]:
    """Return the tokens of `words` from position `start` on."""
    return [words(start + i) for i in range(count)]


def wrong(position: int) -> int:
    """Return another token than `words` has at this position."""
    return 2 + (words(position) - 1) % 317


def right_unless(is_wrong: Callable[[int], bool]) -> Script:
    """Return a script of drafts that are right but for the positions where `is_wrong` is true."""
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
    """Open a session whose model writes `target`, after look-ahead drafts that are `drafter`, by
    default all right. capacity: the largest KV capacity, in place of the model's."""
    manifest = read_manifest(bundle)
    if capacity is not None:
        manifest = manifest.model_copy(
            update={"model": manifest.model.model_copy(update={"max_capacity": capacity})}
        )
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    backend = ScriptedBackend(bundle, manifest, target, drafter or target, max_batch_size=slots)
    return Session(manifest, backend, tokenizer, max_queue=max_queue)


class HeldSession:
    """A context: a session of one slot and a queue of two, each pass of which waits for `go`.
    begun: is set when the first pass begins."""

    def __init__(self, bundle: Path) -> None:
        self.session = reciting_session(bundle, max_queue=2)
        self.begun, self.go = threading.Event(), threading.Event()
        self._run, self.session.backend.run = self.session.backend.run, self._wait  # type: ignore[method-assign]

    def _wait(self, kind: PassKind) -> list[list[int]]:
        self.begun.set()
        assert self.go.wait(20)
        return self._run(kind)

    def __enter__(self) -> HeldSession:
        return self

    def __exit__(self, *_error: object) -> None:
        self.go.set()
        self.session.close()


@pytest.fixture
def held(tiny_bundle: Path) -> Iterator[HeldSession]:
    with HeldSession(tiny_bundle) as held:
        yield held


def runner_of(session: Session) -> Runner:
    """Return the host's record of the session's slots, which may be read while no request runs."""
    return session._worker._scheduler.runner


def watch_capacity(backend: Backend) -> None:
    """Check before every later pass that it writes within the KV cache, in masked slots too."""
    run = backend.run

    def check_and_run(kind):
        lengths = backend.buffers.read("length", (kind.batch,), np.int64)
        width = backend.capabilities.padded_width(kind.plan.width)
        assert lengths.max() + width <= backend.capacity
        return run(kind)

    backend.run = check_and_run  # type: ignore[method-assign]


def assert_idle(session: Session) -> None:
    """Check that no request has a slot or waits, and that the decoding thread has ended."""
    thread = session._worker._thread
    if thread is not None:
        thread.join(10)
    assert session._worker._thread is None
    assert session._worker._scheduler.idle


def recite(ids: Sequence[int], start: int = 1) -> Script:
    """Return the script of a text: `ids` from position `start` on, and elsewhere EOS."""
    return lambda position: ids[position - start] if 0 <= position - start < len(ids) else EOS


def plans_run(session: Session) -> list[str]:
    """Return a list to which every later pass appends the name of its plan."""
    names: list[str] = []
    run = session.backend.run

    def record_and_run(kind):
        names.append(kind.plan.name)
        return run(kind)

    session.backend.run = record_and_run  # type: ignore[method-assign]
    return names


def tokens_of(session: Session, prompt: Sequence[int], options: GenerateOptions) -> list[int]:
    """Run a request and return the tokens of all its pieces."""
    return [token for piece in session.generate_ids(prompt, options) for token in piece]
