"""The stream of a request's output."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

from pass_runtime.decode.sequence import (
    End,
    FinishReason,
    Piece,
    SequenceState,
    Token,
    TokenLogprobs,
)
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import FORKED, PassError

T = TypeVar("T")


class Stream(Generic[T]):
    """A request's output, a piece for each pass, for `for` or `async for`. Each piece is yielded
    once, even over several loops.

    `tokens`, `token_ids` and `text` hold what was read; `stats` counts every pass. At the end
    `finish_reason` is "stop" (`stop_reason`: the end token's id or the stop string), "length" or
    "cancelled"; a failed request raises PassError. A request without references to its stream is
    cancelled. A stream that was read to its end can be pickled.
    """

    def __init__(self, sequence: SequenceState, session: object) -> None:
        """session: garbage-collecting it before the stream would close it."""
        self._sequence, self._session = sequence, session
        self._end: End | None = None  # once it was read
        self._reader_lock = threading.Lock()  # held by a reader that waits for a piece
        # held while an event is read, or while a `for` loop waits
        self._event_lock = threading.Lock()
        self._process = os.getpid()
        self.tokens: list[Token] = []
        self.text = ""
        # At exit, the session ends all requests.
        weakref.finalize(self, setattr, sequence, "cancelled", True).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        if self._end is None:
            raise PassError(
                "a generation can be neither pickled nor copied before it was read to its end: "
                "call result() first"
            )
        sequence = self._sequence
        # without what only decoding needs and cannot be pickled, such as a grammar
        request = replace(sequence.request, plan=None, ngram_drafts=0, processing=None)
        kept = {"tokens": self.tokens, "text": self.text, "_end": self._end}
        about = {"stats": sequence.stats, "prompt_logprobs": sequence.prompt_logprobs}
        return {"request": request, "at": sequence.submitted, "about": about, "kept": kept}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        sequence = SequenceState(state["request"], submitted=state["at"])
        vars(sequence).update(state["about"], finished=state["kept"]["_end"])
        sequence.ended.set()
        Stream.__init__(self, sequence, None)
        vars(self).update(state["kept"])

    @property
    def prompt_ids(self) -> list[int]:
        return list(self._sequence.request.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        """Those read so far, a stop token included."""
        return [token.id for token in self.tokens]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of the prompt's tokens so far; None for the first token. None if not
        requested."""
        if self._sequence.request.prompt_logprobs is None:
            return None
        return list(self._sequence.prompt_logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self._end is None else self._end.reason

    @property
    def stop_reason(self) -> int | str | None:
        return None if self._end is None else self._end.stop

    @property
    def stats(self) -> Stats:
        return self._sequence.stats

    @property
    def seed(self) -> int:
        return self._sequence.request.sampling.seed or 0

    @property
    def submitted(self) -> float:
        """`time.perf_counter()` when it was queued."""
        return self._sequence.submitted

    @property
    def done(self) -> bool:
        """Whether it has ended, even if some pieces were not read yet."""
        return self._sequence.finished is not None

    def cancel(self) -> None:
        """End the request after the pass in progress."""
        self._sequence.cancelled = True

    def result(self, timeout: float | None = None) -> Self:
        """Read all pieces and return this stream. Raises TimeoutError after `timeout` seconds,
        and PassError if the request failed."""
        if os.getpid() != self._process:
            raise PassError(FORKED)
        try:
            self._sequence.ended.wait(timeout)
        finally:  # after an interrupt too, so that `text` is complete
            self._take_all()
        if self._end is None:
            raise TimeoutError(
                f"the request has not ended within {timeout} seconds; wait longer, or cancel it"
            )
        self._raise_failure()
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return a finished request's result as JSON values."""
        fields: dict[str, Any] = {
            "prompt_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            "stats": self.stats.as_dict(),
        }
        if self._sequence.request.logprobs is not None:
            fields["logprobs"] = [_logprobs_dict(each.id, each.logprobs) for each in self.tokens]
        if (prompt_logprobs := self.prompt_logprobs) is not None:
            fields["prompt_logprobs"] = list(map(_logprobs_dict, self.prompt_ids, prompt_logprobs))
        return fields

    def __iter__(self) -> Iterator[T]:
        if self._end is not None:
            raise PassError(
                "this generation was read to its end already; use its text and token_ids"
            )
        return self

    def __next__(self) -> T:
        with _reading([self]), self._event_lock:
            event = self._take(wait=True)
        if isinstance(event, Piece):
            return self._item(event)
        self._raise_failure()
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[T]:
        self.__iter__()
        return self

    async def __anext__(self) -> T:
        with _reading([self]):
            signal = _event_signal([self])
            while (event := self._poll()) is None:
                await signal.wait()
                signal.clear()
        if isinstance(event, Piece):
            return self._item(event)
        self._raise_failure()
        raise StopAsyncIteration

    def _poll(self) -> Piece | End | None:
        with self._event_lock:
            return self._take()

    def _take_all(self) -> None:
        if self._event_lock.acquire(blocking=self._sequence.ended.is_set()):
            try:
                while isinstance(self._take(), Piece):
                    pass
            finally:
                self._event_lock.release()

    def _take(self, *, wait: bool = False) -> Piece | End | None:
        if self._end is not None:
            return self._end
        try:
            events = self._sequence.events
            event = events.get() if wait else events.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, End):
            self._end = event
        else:
            self.tokens += event.tokens
            self.text += event.text
        return event

    def _raise_failure(self) -> None:
        error = None if self._end is None else self._end.error
        if isinstance(error, PassError):
            raise PassError(str(error)) from error
        if error is not None:
            raise error

    @abstractmethod
    def _item(self, piece: Piece) -> T:
        """Return what a loop over the stream yields for `piece`."""


def _logprobs_dict(token: int, logprobs: TokenLogprobs | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    top = [list(pair) for pair in logprobs.top]
    return {"token": token, "logprob": logprobs.logprob, "top": top}


class Generation(Stream[Piece]):
    """With text: loops yield a `Piece` for each pass. `text` lacks special tokens, and bytes of
    a character that was never completed."""

    def _item(self, piece: Piece) -> Piece:
        return piece


class TokenStream(Stream[list[int]]):
    """Without text: loops yield the ids of each pass, one or more."""

    def _item(self, piece: Piece) -> list[int]:
        return [token.id for token in piece.tokens]


async def merged(streams: Sequence[Stream[T]]) -> AsyncGenerator[tuple[int, T | None], None]:
    """Yield pairs (index of the stream, item) as they come; (index, None) is a stream's end.
    Raises a failed request's error."""
    for stream in streams:
        aiter(stream)  # raises if it was read to its end
    with _reading(streams):  # A reader that waits now would not be woken by the new signal.
        signal, unfinished = _event_signal(streams), dict(enumerate(streams))
    while unfinished:
        with _reading(unfinished.values()):
            events = {index: stream._poll() for index, stream in unfinished.items()}
            if not any(events.values()):
                await signal.wait()
                signal.clear()
        for index, event in events.items():
            if isinstance(event, Piece):
                yield index, streams[index]._item(event)
            elif event is not None:
                unfinished.pop(index)._raise_failure()
                yield index, None


@contextmanager
def _reading(streams: Iterable[Stream[T]]) -> Iterator[None]:
    """Be the only reader. Raises PassError if a stream has one, or belongs to another process."""
    held: list[Stream[T]] = []
    try:
        for stream in streams:
            if os.getpid() != stream._process:
                raise PassError(FORKED)
            if not stream._reader_lock.acquire(blocking=False):
                raise PassError(
                    "another thread or task is reading this generation; give every reader a "
                    "request of its own"
                )
            held.append(stream)
        yield
    finally:
        for stream in held:
            stream._reader_lock.release()


def _event_signal(streams: Sequence[Stream[T]]) -> asyncio.Event:
    signal, loop = asyncio.Event(), asyncio.get_running_loop()

    def notify() -> None:
        with suppress(RuntimeError):  # its loop was closed
            loop.call_soon_threadsafe(signal.set)

    for stream in streams:
        stream._sequence.on_event = notify
    return signal
