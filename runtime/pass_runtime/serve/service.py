"""The requests under way: admitted while there is room, decoded to their ends, cancelled when the server stops."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from functools import partial

from pass_runtime.decode.scheduler import QueueFull
from pass_runtime.decode.sequence import Piece
from pass_runtime.errors import PassError
from pass_runtime.generation import Generation, merged
from pass_runtime.options import GenerateOptions
from pass_runtime.serve.errors import ApiError, as_api_error, shutting_down
from pass_runtime.serve.metrics import MetricSink, RequestMetrics, Timing
from pass_runtime.serve.options import ServeOptions
from pass_runtime.serve.parsed_request import ParsedRequest, parse, sequences, text_bytes
from pass_runtime.serve.response_shapes import Choice
from pass_runtime.serve.schemas import ChatRequest, Sampled
from pass_runtime.serve.tokens import TokenTexts
from pass_runtime.session import Session

Event = tuple[Choice, Piece | None]
"""A choice and its next piece, which is None after the last one."""
LONG_TEXT = 1 << 15
"""Bytes. Longer texts are tokenized one at a time, so that short ones do not wait for them."""
SHRINKS = 4
"""The factor by which a tokenizer's normalizer may shorten a text, for example by composing characters."""


class Service:
    """A session with its limits and metrics. All methods are for the event loop's thread."""

    def __init__(self, session: Session, options: ServeOptions, model: str, sink: MetricSink) -> None:
        """model: the name that clients use."""
        self.session, self.options, self.model = session, options, model
        self.texts = TokenTexts(session.tokenizer)
        self.metrics = RequestMetrics(sink, model)
        self.draining = False
        self.requests = 0
        """How many requests have an answer that is not sent to its end."""
        self._live: list[Generation] = []
        self._reading = 0
        """How many sequences belong to requests whose prompts are being tokenized."""
        self._readers = ThreadPoolExecutor(2, "pass-reader")
        self._long = asyncio.Semaphore(1)  # so that one thread is always left for short texts
        self.prompt_tokens = min(options.max_prompt_tokens or sys.maxsize, session.backend.capabilities.max_capacity)
        self._most_bytes = self.prompt_tokens * self.texts.longest() * (SHRINKS if session.tokenizer.normalizer else 1)

    async def parse(self, request: Sampled) -> ParsedRequest:
        """`parsed_request.parse` in a thread. ApiError where it refuses the request, and, before any text is tokenized
        (seconds for long texts), where there is no room for the request or its text cannot fit."""
        arrived, wanted, size = time.perf_counter(), sequences(request), text_bytes(request)
        self.check_room(wanted, reading=self._reading)
        self._check_size(request, size)
        self._reading += wanted
        try:
            async with asyncio.timeout(self.options.request_seconds):
                async with self._long if size > LONG_TEXT else nullcontext():
                    work = partial(parse, self.session, self.options, request, arrived)
                    parsed = await asyncio.get_running_loop().run_in_executor(self._readers, work)
        except TimeoutError as error:
            raise as_api_error(error) from None
        finally:
            self._reading -= wanted
        self.check_room(parsed.sequences)
        return parsed

    def _check_size(self, request: Sampled, size: int) -> None:
        """ApiError where a text is too long to fit even if all its tokens were the longest of the vocabulary."""
        if size > self._most_bytes:
            raise ApiError(
                f"the prompt has {size} bytes, more than the {self.prompt_tokens} tokens that this server reads can "
                "hold; shorten it",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )

    def check_room(self, wanted: int = 1, reading: int = 0) -> None:
        """ApiError where `wanted` more sequences do not fit into slots and queue. reading: how many sequences are being
        tokenized and come first."""
        if self.draining:
            raise shutting_down()
        places = self.session.backend.capabilities.slots + self.options.max_queue
        if wanted > places:
            raise ApiError(f"{wanted} sequences at once are more than the {places} that this server takes", param="n")
        self._live = [generation for generation in self._live if not generation.done]
        if (live := len(self._live) + reading) + wanted > places:
            raise ApiError(
                f"{live} sequences are under way already, and this server takes {places}: try again later",
                429,
                code="queue_full",
                headers={"Retry-After": "1"},
            )

    @asynccontextmanager
    async def decode(self, parsed: ParsedRequest) -> AsyncIterator[list[Choice]]:
        """Submit the sequences of a request. Leaving the context cancels those that have not ended."""
        self.check_room(parsed.sequences)
        choices: list[Choice] = []
        self.requests += 1
        try:
            for ids, options in parsed.prompts:
                for generation in self._submit(ids, options):
                    choices.append(Choice(len(choices), generation, Timing(parsed.arrived)))
                    self._live.append(generation)
            yield choices
        finally:
            self.requests -= 1
            for choice in choices:
                choice.generation.cancel()
            for choice in choices:
                self.metrics.record_end(choice.generation, choice.timing)

    def _submit(self, ids: list[int], options: Sequence[GenerateOptions]) -> list[Generation]:
        try:
            return self.session.generate_all(ids, options)
        except QueueFull as error:
            raise as_api_error(error) from None
        except PassError as error:
            raise ApiError(str(error), 503 if self.session.closed else 400) from None

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
        for generation in self._live:
            generation.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._idle()

    async def _idle(self) -> None:
        while self.requests:
            await asyncio.sleep(0.02)
