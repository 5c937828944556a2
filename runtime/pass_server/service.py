"""The requests under way: admitted while there is room, decoded to their ends, cancelled when the server stops."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

from pass_runtime import PassError, Piece, QueueFull, Session, merged
from pass_server.api_error import ApiError, as_api_error, shutting_down
from pass_server.choices import ChatAnswer, Choice
from pass_server.formatters import TokenTexts
from pass_server.metrics import MetricSink, RequestMetrics, Timing
from pass_server.parsed_request import ParsedRequest, constraint_errors, read, sequences, text_bytes
from pass_server.schemas import ChatRequest, Sampled
from pass_server.serve_options import ServeOptions

T = TypeVar("T")
Event = tuple[Choice, Piece | None]
"""A choice and its next piece, which is None after the last one."""
LONG_TEXT_BYTES = 1 << 15
"""Longer texts are tokenized one at a time, so that short ones do not wait for them."""
MAX_SHRINK_FACTOR = 4
"""The largest factor by which a tokenizer's normalizer may shorten a text, for example by composing characters."""


class Service:
    """A session with its limits and metrics. All methods are for the event loop's thread."""

    def __init__(self, session: Session, options: ServeOptions, model: str, sink: MetricSink) -> None:
        """model: the name that clients use."""
        self.session, self.options, self.model = session, options, model
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns if a process forks
        self.texts = TokenTexts(session.vocabulary)
        self.metrics = RequestMetrics(sink, model)
        self.draining = False
        self._answers: list[list[Choice]] = []
        """The choices of every request whose answer is not sent to its end."""
        self._readers = ThreadPoolExecutor(2, "pass-reader")
        self._long = asyncio.Semaphore(1)  # so that one thread is always left for short texts
        self.prompt_tokens = min(options.max_prompt_tokens or sys.maxsize, session.capacity)
        longest = session.vocabulary.longest() * (MAX_SHRINK_FACTOR if session.tokenizer.normalizer else 1)
        self._most_bytes = self.prompt_tokens * longest

    @property
    def requests(self) -> int:
        """How many requests have an answer that is not sent to its end."""
        return len(self._answers)

    async def parse(self, request: Sampled, size: int | None = None, client: str = "") -> ParsedRequest:
        """`parsed_request.read` in threads, none of which waits for a constraint. Raises ApiError if it refuses the
        request, and, before any text is tokenized (seconds for long texts), where there is no room for the request or
        its text cannot fit. size: of the whole request in bytes; None for that of its longest prompt. client: the
        digest of its API key, "" on servers without keys."""
        arrived, wanted, longest = time.perf_counter(), sequences(request), text_bytes(request)
        with self._admission(wanted), self.session.reserve(wanted, self.options.max_queue):
            self._check_size(request, longest)
            reading = partial(read, self.session, self.options, request, arrived, client)
            found = await self.read(reading, longest if size is None else size)
            for future, param in found.compiling:
                await self._wait(future)
                with constraint_errors(param):
                    future.result()
            return await self.read(found.finish, 0)

    async def read(self, work: Callable[[], T], size: int) -> T:
        """What `work`, which reads `size` bytes of text, returns in a thread. Raises ApiError if it takes too long."""
        try:
            async with asyncio.timeout(self.options.request_seconds):
                async with self._long if size > LONG_TEXT_BYTES else nullcontext():
                    return await asyncio.get_running_loop().run_in_executor(self._readers, work)
        except TimeoutError as error:
            raise as_api_error(error) from None

    async def _wait(self, future: Future[Any]) -> None:
        """Wait for a future that others may wait for, too. Raises ApiError if it takes too long."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(done.set)

        future.add_done_callback(wake)
        try:
            async with asyncio.timeout(self.options.request_seconds):
                await done.wait()
        except TimeoutError as error:
            raise as_api_error(error) from None

    def check_model(self, name: str | None) -> None:
        """Raises ApiError if a request names another model."""
        if name not in (None, self.model):
            problem = f"no model {name!r} here; it is {self.model!r}"
            raise ApiError(problem, 404, param="model", code="model_not_found")

    def _check_size(self, request: Sampled, size: int) -> None:
        """Raises ApiError if a text is too long to fit even if all its tokens were the longest of the vocabulary."""
        if size > self._most_bytes:
            raise ApiError(
                f"the prompt has {size} bytes, more than the {self.prompt_tokens} tokens that this server reads can "
                "hold; shorten it",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )

    @contextmanager
    def _admission(self, wanted: int) -> Iterator[None]:
        """For a block that asks the session for `wanted` places: what it refuses becomes the client's error."""
        if self.draining:
            raise shutting_down()
        places = self.session.slots + self.options.max_queue
        if wanted > places:
            raise ApiError(f"{wanted} sequences at once are more than the {places} that this server takes", param="n")
        try:
            yield
        except QueueFull as error:
            raise as_api_error(error) from None
        except PassError as error:
            raise ApiError(str(error), 503 if self.session.closed else 400) from None

    @asynccontextmanager
    async def decode(self, parsed: ParsedRequest) -> AsyncIterator[list[Choice]]:
        """Begin the sequences of a request, all of them or none. Leaving the context cancels those that have not
        ended."""
        with self._admission(len(parsed.requests)):
            generations = self.session.begin(parsed.requests, self.options.max_queue)
        self.metrics.record_begin(parsed.form)
        choices = [Choice(i, generation, Timing(parsed.arrived)) for i, generation in enumerate(generations)]
        for choice in choices:
            choice.echo = parsed.echo[choice.index // parsed.written] if parsed.echo else ""
            choice.answer = ChatAnswer(parsed.turn) if parsed.turn is not None else None
        self._answers.append(choices)
        try:
            yield choices
        finally:
            self._answers = [others for others in self._answers if others is not choices]
            for choice in choices:
                choice.generation.cancel()
            for choice in choices:
                self.metrics.record_end(choice.generation, choice.timing)

    async def events(self, choices: list[Choice]) -> AsyncGenerator[Event, None]:
        """The pieces of all choices as they come. Raises the error of the first that fails."""
        pieces = merged([choice.generation for choice in choices])
        async with aclosing(pieces):
            async for place, piece in pieces:
                choice = choices[place]
                if piece is not None:
                    self.metrics.record_piece(piece, choice.timing)
                elif choice.generation.finish_reason == "cancelled":
                    raise shutting_down()
                yield choice, piece

    async def drain(self, seconds: float) -> None:
        """Take no new requests. After `seconds` cancel those under way, and wait until their answers have ended."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle()
        for choices in self._answers:
            for choice in choices:
                choice.generation.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._idle()

    async def _idle(self) -> None:
        while self.requests:
            await asyncio.sleep(0.02)
