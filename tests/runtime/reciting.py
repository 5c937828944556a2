"""Sessions with the tiny bundle's tails and tokenizer, whose model recites a text of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scripted import Script, ScriptedBackend
from tokenizers import Tokenizer

from pass_runtime.backends.base import Backend
from pass_runtime.bundle.read import read_manifest
from pass_runtime.decode.runner import Runner
from pass_runtime.session import Session

BOS, EOS = 0, 1


def words(position: int) -> int:
    """A text without special tokens and without repeats nearby, as a function of the position."""
    return 2 + (position * 37 + position // 7) % 317


def wrong(position: int) -> int:
    """Another token than the text has at this position."""
    return 2 + (words(position) - 1) % 317


def right_unless(misses: Callable[[int], bool]) -> Script:
    return lambda position: wrong(position) if misses(position) else words(position)


def reciting_session(
    bundle: Path,
    target: Script = words,
    drafter: Script | None = None,
    *,
    slots: int = 1,
    max_queue: int = 1024,
    capacity: int | None = None,
) -> Session:
    manifest = read_manifest(bundle)
    if capacity is not None:
        manifest = manifest.model_copy(
            update={"model": manifest.model.model_copy(update={"max_capacity": capacity})}
        )
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    backend = ScriptedBackend(bundle, manifest, target, drafter or target, max_batch_size=slots)
    return Session(manifest, backend, tokenizer, max_queue=max_queue)


def runner_of(session: Session) -> Runner:
    """The host's record of the session's slots, to read while no request runs."""
    return session._worker._scheduler.runner


def watch_capacity(backend: Backend) -> None:
    """Check before every pass that it writes within the cache, in masked slots too."""
    run = backend.run

    def watched(kind):
        lengths = backend.buffers.read("length", (kind.batch,), np.int64)
        width = backend.capabilities.padded_width(kind.plan.width)
        assert lengths.max() + width <= backend.capacity
        return run(kind)

    backend.run = watched  # type: ignore[method-assign]


def assert_idle(session: Session) -> None:
    """No request has a slot or waits, and the decoding thread has ended."""
    thread = session._worker._thread
    if thread is not None:
        thread.join(10)
    assert session._worker._thread is None
    assert session._worker._scheduler.idle


def recite(ids: Sequence[int], start: int = 1) -> Script:
    """`ids` from position `start` on, then end-of-sequence."""
    return lambda position: ids[position - start] if 0 <= position - start < len(ids) else EOS


def plans_run(session: Session) -> list[str]:
    """A list to which every pass appends the name of its plan."""
    names: list[str] = []
    run = session.backend.run

    def recorded(kind):
        names.append(kind.plan.name)
        return run(kind)

    session.backend.run = recorded  # type: ignore[method-assign]
    return names
