"""What `generate`, `chat`, `generate_ids` and `submit` return: a request under way, to be read by one reader."""

from __future__ import annotations

import asyncio
import queue
import weakref
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from pass_runtime.decode.sequence import Chunk, End, FinishReason, Sequence, Token
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import PassError

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Text that is final, and the tokens read since the last piece (either may be empty)."""

    text: str
    tokens: tuple[Token, ...]
    written: float = field(default=0.0, compare=False)
    """`time.perf_counter` behind the pass that it came of."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


class Stream(Generic[T]):
    """One-shot: iterate (or `async for`) for what comes; breaking out and iterating on continues where it was.

    `tokens`, `token_ids` and `text` are what was read so far. Once it ended, `finish_reason` is "stop" (`stop_reason`
    then holds the token or string), "length" or "cancelled"; what failed raises PassError where it is read.
    `stats` counts along. A stream that nobody holds any more is cancelled.
    """

    def __init__(self, sequence: Sequence, owner: object) -> None:
        """owner: what must not be closed while somebody reads: the session."""
        self._sequence, self._owner = sequence, owner
        self._end: End | None = None
        self._told_end = False
        self.tokens: list[Token] = []
        self.text = ""
        weakref.finalize(self, setattr, sequence, "cancelled", True).atexit = False

    @property
    def prompt_ids(self) -> list[int]:
        return list(self._sequence.request.prompt_ids)

    @property
    def token_ids(self) -> list[int]:
        """Every token kept, a stop token included."""
        return [token.id for token in self.tokens]

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
        """What sampling was seeded with: with it the text can be had again."""
        return self._sequence.request.sampling.seed or 0

    @property
    def submitted(self) -> float:
        """`time.perf_counter` when it was put into the queue."""
        return self._sequence.submitted

    @property
    def done(self) -> bool:
        """Whether it has ended, read or not."""
        return self._sequence.finished is not None

    def cancel(self) -> None:
        """End it as soon as the pass in progress is done; what was written until then can still be read."""
        self._sequence.cancelled = True

    def run(self) -> Self:
        """Wait for the end without looking at the pieces. Raises PassError where the request failed."""
        return self.result()

    def result(self, timeout: float | None = None) -> Self:
        """`run`, for `timeout` seconds at most: then TimeoutError, and it goes on."""
        try:
            self._sequence.ended.wait(timeout)
        finally:  # an interrupt, too, leaves what was written until then
            self._take_all()
        if self._end is None:
            raise TimeoutError(f"the request has not ended within {timeout} seconds")
        self._close()
        return self

    def as_dict(self) -> dict[str, Any]:
        """What a finished request did, for JSON."""
        found: dict[str, Any] = {
            "prompt_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            "stats": self.stats.as_dict(),
        }
        if self._sequence.request.logprobs is not None:
            found["logprobs"] = [
                {"token": token.id, "logprob": told.logprob, "top": [list(pair) for pair in told.top]}
                for token in self.tokens
                if (told := token.logprobs) is not None
            ]
        return found

    def __iter__(self) -> Iterator[T]:
        if self._told_end:
            raise PassError("this generation was read to its end; what it wrote is in its text and token_ids")
        return self

    def __next__(self) -> T:
        while self._end is None:
            event = self._sequence.events.get()
            self._take(event)
            if isinstance(event, Chunk):
                return self._item(event)
        self._close()
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[T]:
        self.__iter__()
        return self

    async def __anext__(self) -> T:
        news = _news_of([self])
        while self._end is None:
            event = self._poll()
            if isinstance(event, Chunk):
                return self._item(event)
            if event is None:
                await news.wait()
                news.clear()
        self._close()
        raise StopAsyncIteration

    def _poll(self) -> Chunk | End | None:
        """The next event, taken; None where there is none yet."""
        try:
            event = self._sequence.events.get_nowait()
        except queue.Empty:
            return None
        self._take(event)
        return event

    def _take_all(self) -> None:
        """Everything that is there."""
        while self._end is None and self._poll() is not None:
            pass

    def _take(self, event: Chunk | End) -> None:
        if isinstance(event, End):
            self._end = event
        else:
            self.tokens += event.tokens
            self.text += event.text

    def _close(self) -> None:
        self._told_end = True
        self._raise_error()

    def _raise_error(self) -> None:
        error = None if self._end is None else self._end.error
        if isinstance(error, PassError):
            raise PassError(str(error)) from error
        if error is not None:
            raise error

    @abstractmethod
    def _item(self, chunk: Chunk) -> T:
        """What a reader is given for one pass."""


class Generation(Stream[Piece]):
    """A request as text: iterate for pieces.

    `text` is the pieces joined. Bytes of a character that was never completed are left out of it; they are in
    `token_ids`. Special tokens are in `token_ids` but not in `text`.
    """

    def _item(self, chunk: Chunk) -> Piece:
        return Piece(chunk.text, chunk.tokens, chunk.written)


class TokenStream(Stream[list[int]]):
    """A request as token ids: iterate for those of each pass (at least one)."""

    def _item(self, chunk: Chunk) -> list[int]:
        return [token.id for token in chunk.tokens]


async def merged(streams: Items[Stream[T]]) -> AsyncGenerator[tuple[int, T | None], None]:
    """What comes of several streams as it comes, with its stream's place among them; None behind a stream's last.

    Raises what failed in any of them, PassError most of the time.
    """
    for stream in streams:
        aiter(stream)  # refuses one that was read
    news, left = _news_of(streams), dict(enumerate(streams))
    while left:
        news.clear()
        events = [(place, event) for place, stream in left.items() if (event := stream._poll()) is not None]
        for place, event in events:
            if isinstance(event, Chunk):
                yield place, streams[place]._item(event)
            else:
                left.pop(place)._close()
                yield place, None
        if not events:
            await news.wait()


def _news_of(streams: Items[Stream[T]]) -> asyncio.Event:
    """Set in the running loop at every event of these from now on."""
    news, loop = asyncio.Event(), asyncio.get_running_loop()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop is gone, and so is the reader
            loop.call_soon_threadsafe(news.set)

    for stream in streams:
        stream._sequence.on_event = tell
    return news
