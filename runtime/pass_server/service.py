"""Admits requests while there is room, parses and decodes them, and cancels them when the server
stops."""

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
    nullcontext,
    suppress,
)
from functools import partial
from typing import Any, TypeVar

from pass_runtime import PassError, Piece, QueueFull, Session, merged
from pass_server.api_error import ApiError, as_api_error, shutting_down
from pass_server.choices import ChatAnswer, Choice
from pass_server.formatters import TokenTexts
from pass_server.metrics import MetricSink, RequestMetrics, Timing
from pass_server.parsed_request import (
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
"""A choice and its next piece, which is None after the last one."""
LONG_TEXT_BYTES = 1 << 15
"""Longer texts are tokenized one at a time, so that short ones do not wait for them."""
MAX_SHRINK_FACTOR = 4
"""The largest factor by which a tokenizer's normalizer may shorten a text, for example by composing
characters."""


class Service:
    """A session with its limits and metrics. All methods must be called in the event loop's
    thread."""

    def __init__(
        self, session: Session, options: ServeOptions, model: str, sink: MetricSink
    ) -> None:
        """model: the name that clients use."""
        self.session, self.options, self.model = session, options, model
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or it warns if a process forks
        self.texts = TokenTexts(session.vocabulary)
        self.parser = RequestParser(session, options)
        self.metrics = RequestMetrics(sink, model)
        self.draining = False
        self._active: list[list[Choice]] = []
        """The choices of each request whose answer has not ended."""
        self._executor = ThreadPoolExecutor(2, "pass-reader")
        # So that one thread is always left for short texts.
        self._long_text_slot = asyncio.Semaphore(1)
        self._max_prompt_tokens = min(options.max_prompt_tokens or sys.maxsize, session.capacity)
        longest = session.vocabulary.longest() * (
            MAX_SHRINK_FACTOR if session.tokenizer.normalizer else 1
        )
        self._max_prompt_bytes = self._max_prompt_tokens * longest

    @property
    def active_requests(self) -> int:
        """How many requests have an answer that has not ended."""
        return len(self._active)

    def has_room(self, count: int) -> bool:
        """Whether `count` sequences that begin now get slots at once."""
        usage = self.session.usage()
        return usage.running + usage.waiting + count <= usage.slots

    async def parse(
        self, request: GenerationRequest, size: int | None = None, key_digest: str = ""
    ) -> ParsedRequest:
        """Check and tokenize a request in threads, then wait for its constraints. Raises ApiError
        if it is invalid, if there is no room for it, or if a text is too long; the last two are
        checked before it is tokenized, which may take seconds. size: bytes of the whole request; if
        None, those of its longest prompt count. key_digest: of its API key, "" if the server has no
        keys. The request has its places until it begins or nobody refers to it."""
        arrived, wanted, longest = (
            time.perf_counter(),
            count_sequences(request),
            prompt_bytes(request),
        )
        with self._admission(wanted), ExitStack() as until_parsed:
            places = until_parsed.enter_context(
                self.session.reserve(wanted, self.options.max_queue)
            )
            self._check_size(request, longest)
            work = partial(self.parser.tokenize, request, arrived, key_digest)
            found = await self.run_in_thread(work, longest if size is None else size)
            for future, param in found.compiling:
                await self._wait(future)
                with constraint_errors(param):
                    future.result()
            parsed = await self.run_in_thread(partial(self.parser.finish, found, places), 0)
            until_parsed.pop_all()
            return parsed

    async def run_in_thread(self, work: Callable[[], T], size: int) -> T:
        """Run `work`, which reads `size` bytes of text, in a thread. Raises ApiError if it takes
        too long."""
        try:
            async with asyncio.timeout(self.options.request_seconds):
                async with self._long_text_slot if size > LONG_TEXT_BYTES else nullcontext():
                    return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except TimeoutError as error:
            raise as_api_error(error) from None

    async def _wait(self, future: Future[Any]) -> None:
        """Wait for a future without cancelling it: others may wait for it. Raises ApiError if it
        takes too long."""
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
            problem = f"no model {name!r}: this server serves {self.model!r}"
            raise ApiError(problem, 404, param="model", code="model_not_found")

    def _check_size(self, request: GenerationRequest, size: int) -> None:
        """Raises ApiError if a text is too long to fit even if all its tokens were the longest of
        the vocabulary."""
        if size > self._max_prompt_bytes:
            raise ApiError(
                f"the prompt has {size} bytes, more than fit in {self._max_prompt_tokens} tokens, "
                "the limit of this server; shorten it",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )

    @contextmanager
    def _admission(self, wanted: int) -> Iterator[None]:
        """Raises ApiError if the server drains or `wanted` sequences are too many, and for
        PassErrors of the block."""
        if self.draining:
            raise shutting_down()
        places = self.session.slots + self.options.max_queue
        if wanted > places:
            raise ApiError(
                f"{wanted} sequences are more than {places}, the limit of this server; lower n",
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
        """Begin the sequences of a request, all of them or none. Leaving the context cancels
        unfinished ones."""
        with self._admission(len(parsed.requests)):
            generations = self.session.begin(parsed.requests, parsed.places)
        self.metrics.record_begin(parsed.constraint_kind)
        choices = [
            Choice(i, generation, Timing(parsed.arrived))
            for i, generation in enumerate(generations)
        ]
        for choice in choices:
            choice.echo = parsed.echo[choice.index // parsed.per_prompt] if parsed.echo else ""
            choice.answer = (
                ChatAnswer(parsed.turn_format) if parsed.turn_format is not None else None
            )
        self._active.append(choices)
        try:
            yield choices
        finally:
            self._active = [others for others in self._active if others is not choices]
            for choice in choices:
                choice.generation.cancel()
            for choice in choices:
                self.metrics.record_end(choice.generation, choice.timing)

    async def events(self, choices: list[Choice]) -> AsyncGenerator[ChoicePiece, None]:
        """The pieces of all choices as they come. Raises the error of the first choice that
        fails."""
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
        """Take no new requests. After `seconds` cancel those under way, and wait until their
        answers have ended."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wait_until_idle()
        for choices in self._active:
            for choice in choices:
                choice.generation.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._wait_until_idle()

    async def _wait_until_idle(self) -> None:
        while self._active:
            await asyncio.sleep(0.02)
