"""What every endpoint does with a request, over HTTP or in Triton."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import (
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from typing import Any, TypeVar

from pass_runtime import PassError, Piece, QueueFull, Session, merged
from pass_server.answers import ChatAnswer, Choice, TokenTexts
from pass_server.api_error import ApiError, as_api_error, shutting_down
from pass_server.metrics import MetricSink, RequestMetrics
from pass_server.request import (
    ParsedRequest,
    RequestParser,
    constraint_errors,
    count_sequences,
    prompt_bytes,
)
from pass_server.schemas import ChatRequest, GenerationRequest
from pass_server.serve_options import ServeOptions

T = TypeVar("T")
ChoicePiece = tuple[Choice, Piece | None]
"""A choice and its next piece; None if the choice has ended."""
LONG_TEXT_BYTES = 1 << 15
"""Longer texts are tokenized one at a time, so that short texts need not wait for them."""
MAX_SHRINK_FACTOR = 4
"""The largest factor by which a normalizer may shorten a text."""


class Service:
    """A session with its limits and metrics. Only the event loop's thread may call it."""

    def __init__(
        self, session: Session, options: ServeOptions, model: str, sink: MetricSink
    ) -> None:
        """model: the name by which clients call the model."""
        self.session, self.options, self.model = session, options, model
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or tokenizers warns at a fork
        self.texts = TokenTexts(session.vocabulary)
        self.parser = RequestParser(session, options)
        self._metrics = RequestMetrics(sink, model)
        self.draining = False
        self._active: list[list[Choice]] = []
        self._executor = ThreadPoolExecutor(2, "pass-reader")
        # One of the two threads is left for short texts.
        self._long_text_semaphore = asyncio.Semaphore(1)
        self._max_prompt_tokens = min(options.max_prompt_tokens or sys.maxsize, session.capacity)
        shrink_factor = MAX_SHRINK_FACTOR if session.tokenizer.normalizer else 1
        max_token_bytes = session.vocabulary.longest() * shrink_factor
        self._max_prompt_bytes = self._max_prompt_tokens * max_token_bytes

    @property
    def active_requests(self) -> int:
        return len(self._active)

    def has_room(self, count: int) -> bool:
        """Whether `count` sequences would get slots now."""
        usage = self.session.usage()
        return usage.running + usage.waiting + count <= usage.slots

    @asynccontextmanager
    async def time_limit(self, arrived: float) -> AsyncIterator[None]:
        """Raise ApiError if a request that came at `arrived` takes longer than it may."""
        try:
            async with asyncio.timeout(
                arrived + self.options.request_seconds - time.perf_counter()
            ):
                yield
        except TimeoutError as error:
            raise as_api_error(error) from None

    async def parse(
        self,
        request: GenerationRequest,
        size: int | None = None,
        key_digest: str = "",
        arrived: float | None = None,
    ) -> ParsedRequest:
        """Check and tokenize a request in threads, then wait until its constraints are compiled.
        Raises ApiError if the request is invalid or too long, or if there is no room for it. Its
        places are free again when it has ended, or when the result is garbage-collected.

        size: the bytes of the request; by default, those of its longest prompt. key_digest: of its
        API key; "" if the server has no keys. arrived: `time.perf_counter`, by default now."""
        arrived = time.perf_counter() if arrived is None else arrived
        sequences, longest_prompt = count_sequences(request), prompt_bytes(request)
        async with self.time_limit(arrived):
            with self._admission(sequences), ExitStack() as until_parsed:
                places = until_parsed.enter_context(
                    self.session.reserve(sequences, self.options.max_queue)
                )
                if longest_prompt > self._max_prompt_bytes:
                    raise ApiError(
                        f"the prompt has {longest_prompt} bytes, more than fit in "
                        f"{self._max_prompt_tokens} tokens, the limit of this server; shorten it",
                        param=request.path(
                            "messages" if isinstance(request, ChatRequest) else "prompt"
                        ),
                        code="context_length_exceeded",
                    )
                work = partial(self.parser.tokenize, request, arrived, key_digest)
                tokenized = await self.run_in_thread(work, longest_prompt if size is None else size)
                for future, param in tokenized.compiling:
                    await self._wait(future)
                    with constraint_errors(param):
                        future.result()
                parsed = await self.run_in_thread(partial(self.parser.finish, tokenized, places), 0)
                until_parsed.pop_all()  # the places now belong to `parsed`
                return parsed

    async def _wait(self, future: Future[Any]) -> None:
        """Wait for a future that other requests may wait for, too."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        future.add_done_callback(lambda _: _soon(loop, done.set))
        await done.wait()

    async def run_in_thread(self, work: Callable[[], T], size: int) -> T:
        """size: the bytes of text that `work` reads."""
        loop = asyncio.get_running_loop()
        if size <= LONG_TEXT_BYTES:
            return await loop.run_in_executor(self._executor, work)
        await self._long_text_semaphore.acquire()
        working = self._executor.submit(work)
        # A thread goes on after a timeout: only its end makes room for another long text.
        working.add_done_callback(lambda _: _soon(loop, self._long_text_semaphore.release))
        return await asyncio.wrap_future(working)

    def check_model(self, name: str | None) -> None:
        if name not in (None, self.model):
            problem = f"no model {name!r}: this server serves {self.model!r}"
            raise ApiError(problem, 404, param="model", code="model_not_found")

    @contextmanager
    def _admission(self, count: int) -> Iterator[None]:
        """Raise ApiError if the server takes no new requests or never has room for `count`
        sequences. A PassError of the `with` block becomes an ApiError."""
        if self.draining:
            raise shutting_down()
        limit = self.session.slots + self.options.max_queue
        if count > limit:
            raise ApiError(
                f"{count} sequences are more than {limit}, the limit of this server; lower n",
                param="n",
            )
        try:
            yield
        except QueueFull as error:
            raise as_api_error(error) from None
        except PassError as error:
            raise ApiError(str(error), 503 if self.session.closed else 400) from None

    @asynccontextmanager
    async def decode(self, parsed: ParsedRequest) -> AsyncIterator[list[Choice]]:
        """Begin all sequences of a request or none. Leaving the context cancels them."""
        with self._admission(len(parsed.requests)):
            generations = self.session.begin(parsed.requests, parsed.places)
        self._metrics.record_begin(parsed.constraint_kind)
        choices = [Choice(i, each, parsed.arrived) for i, each in enumerate(generations)]
        for choice in choices:
            if parsed.echo:
                choice.echo = parsed.echo[choice.index // parsed.per_prompt]
            if parsed.turn_format is not None:
                choice.answer = ChatAnswer(parsed.turn_format)
        self._active.append(choices)
        try:
            yield choices
        finally:
            self._active = [active for active in self._active if active is not choices]
            for choice in choices:
                choice.generation.cancel()
            for choice in choices:
                self._metrics.record_end(choice)

    async def pieces(self, choices: list[Choice]) -> AsyncGenerator[ChoicePiece, None]:
        """Yield the pieces of all choices as they come. Raises the first error of a choice."""
        pieces = merged([choice.generation for choice in choices])
        async with aclosing(pieces):
            async for index, piece in pieces:
                choice = choices[index]
                if piece is not None:
                    self._metrics.record_piece(choice, piece)
                elif choice.generation.finish_reason == "cancelled":
                    raise shutting_down()  # Only `drain` cancels sequences that are being read.
                yield choice, piece

    async def drain(self, seconds: float) -> None:
        """Take no new requests, and cancel those under way that have not ended after `seconds`."""
        self.draining = True
        await self._wait_until_idle(seconds)
        for choices in self._active:
            for choice in choices:
                choice.generation.cancel()
        await self._wait_until_idle(5)  # Cancelled sequences end after the pass in progress.

    async def _wait_until_idle(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._active:
                    await asyncio.sleep(0.02)


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(callback)
