"""What every endpoint does with a request, over HTTP or in Triton: `Service.parse` admits and
checks it, `Service.decode` begins its sequences, `Service.pieces` yields what they write."""

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
from pass_server import metrics
from pass_server.api_error import ApiError, as_api_error, shutting_down
from pass_server.choices import ChatAnswer, Choice
from pass_server.logprobs import TokenTexts
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
"""A choice and its next piece. None in place of a piece: the choice has ended."""
LONG_TEXT_BYTES = 1 << 15
"""Longer texts are tokenized one at a time, so that short texts need not wait for them."""
MAX_SHRINK_FACTOR = 4
"""The largest factor by which a normalizer may shorten a text, as by composing characters."""


class Service:
    """A session with its limits and metrics. Only the event loop's thread may call it."""

    def __init__(
        self, session: Session, options: ServeOptions, model: str, sink: metrics.MetricSink
    ) -> None:
        """model: the name by which clients call the model."""
        self.session, self.options, self.model = session, options, model
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or tokenizers warns at a fork
        self.texts = TokenTexts(session.vocabulary)
        self.parser = RequestParser(session, options)
        self._metrics = RequestMetrics(sink, model)
        self.draining = False
        self._active: list[list[Choice]] = []
        """The choices of each request whose answer has not ended."""
        self._executor = ThreadPoolExecutor(2, "pass-reader")
        # A long text takes this semaphore, so one of the two threads is left for short ones.
        self._long_text_semaphore = asyncio.Semaphore(1)
        self._max_prompt_tokens = min(options.max_prompt_tokens or sys.maxsize, session.capacity)
        shrink_factor = MAX_SHRINK_FACTOR if session.tokenizer.normalizer else 1
        max_token_bytes = session.vocabulary.longest() * shrink_factor
        self._max_prompt_bytes = self._max_prompt_tokens * max_token_bytes

    @property
    def active_requests(self) -> int:
        """How many requests have an answer that has not ended."""
        return len(self._active)

    def has_room(self, count: int) -> bool:
        """Return whether `count` sequences would get slots now, without waiting."""
        usage = self.session.usage()
        return usage.running + usage.waiting + count <= usage.slots

    async def parse(
        self, request: GenerationRequest, size: int | None = None, key_digest: str = ""
    ) -> ParsedRequest:
        """Check and tokenize a request in threads, then wait until its constraints are compiled.
        Raises ApiError if the request is invalid, if there is no room for it, or if a text is too
        long. Room and lengths are checked first, because tokenizing may take seconds. The places in
        slots and queue that are reserved for the request, one for each sequence, are free again
        when it has ended, or when the result is garbage-collected.

        size: the bytes of the request, which decide whether it is a long text; by default, those of
        its longest prompt. key_digest: the digest of its API key; "" if the server has no keys.
        """
        arrived, sequences = time.perf_counter(), count_sequences(request)
        longest_prompt = prompt_bytes(request)
        with self._admission(sequences), ExitStack() as until_parsed:
            places = until_parsed.enter_context(
                self.session.reserve(sequences, self.options.max_queue)
            )
            self._check_size(request, longest_prompt)
            work = partial(self.parser.tokenize, request, arrived, key_digest)
            tokenized = await self.run_in_thread(work, longest_prompt if size is None else size)
            for future, param in tokenized.compiling:
                await self._wait(future)
                with constraint_errors(param):
                    future.result()
            parsed = await self.run_in_thread(partial(self.parser.finish, tokenized, places), 0)
            until_parsed.pop_all()  # the places now belong to `parsed`
            return parsed

    async def run_in_thread(self, work: Callable[[], T], size: int) -> T:
        """Call `work` in a thread, and return its result. Raises ApiError if that takes too long.
        size: the bytes of text that `work` reads, which decide whether the text is long."""
        try:
            async with asyncio.timeout(self.options.request_seconds):
                async with self._long_text_semaphore if size > LONG_TEXT_BYTES else nullcontext():
                    return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except TimeoutError as error:
            raise as_api_error(error) from None

    async def _wait(self, future: Future[Any]) -> None:
        """Wait for a future, without cancelling it: other requests may wait for it too. Raises
        ApiError if it takes too long."""
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
        """Raise ApiError if a request names another model."""
        if name not in (None, self.model):
            problem = f"no model {name!r}: this server serves {self.model!r}"
            raise ApiError(problem, 404, param="model", code="model_not_found")

    def _check_size(self, request: GenerationRequest, size: int) -> None:
        """Raise ApiError if a prompt of `size` bytes has too many tokens even if all are of the
        longest kind."""
        if size > self._max_prompt_bytes:
            raise ApiError(
                f"the prompt has {size} bytes, more than fit in {self._max_prompt_tokens} tokens, "
                "the limit of this server; shorten it",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )

    @contextmanager
    def _admission(self, count: int) -> Iterator[None]:
        """Raise ApiError if the server takes no new requests, or has room for fewer than `count`
        sequences even when idle. A PassError of the `with` block becomes an ApiError."""
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
        """Begin all sequences of a request or none. Leaving the context cancels unfinished ones."""
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
        """Wait until no request is active, for at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._active:
                    await asyncio.sleep(0.02)


class RequestMetrics:
    """Records requests while they are decoded and when they end."""

    def __init__(self, sink: metrics.MetricSink, model: str) -> None:
        self._sink, self._model = sink, model

    def record_begin(self, constraint_kind: str | None) -> None:
        """Record that a request has begun. constraint_kind: `ParsedRequest.constraint_kind`."""
        if constraint_kind is not None:
            self._record(metrics.CONSTRAINED_REQUESTS, 1, constraint_kind)

    def record_piece(self, choice: Choice, piece: Piece) -> None:
        """Record that a pass has written tokens of a sequence."""
        if not piece.tokens:
            return
        self._record(metrics.GENERATION_TOKENS, len(piece.tokens))
        if choice.first_written is None:
            choice.first_written = piece.written
            self._record(metrics.TIME_TO_FIRST_TOKEN, piece.written - choice.arrived)
        else:
            self._record(metrics.INTER_TOKEN_LATENCY, piece.written - choice.last_written)
        choice.last_written = piece.written

    def record_end(self, choice: Choice) -> None:
        """Record that a sequence has ended, by itself or with its request."""
        generation, stats, record = choice.generation, choice.generation.stats, self._record
        reason = str(generation.finish_reason)
        if reason not in metrics.FINISHED_REASONS:
            reason = "abort"
        record(metrics.REQUEST_SUCCESS, 1, reason)
        record(metrics.PROMPT_TOKENS, stats.prompt_tokens)
        record(metrics.CACHE_QUERIES, stats.prompt_tokens)
        record(metrics.CACHE_HITS, stats.cached_tokens)
        record(metrics.QUEUE_TIME, stats.queue_seconds)
        record(metrics.E2E_LATENCY, time.perf_counter() - choice.arrived)
        record(metrics.REQUEST_PROMPT_TOKENS, stats.prompt_tokens)
        record(metrics.REQUEST_GENERATION_TOKENS, stats.generated_tokens)
        # `record_piece` counted the tokens of pieces that were yielded, which are in
        # `generation.tokens`; a cancelled sequence may have written more.
        record(metrics.GENERATION_TOKENS, stats.generated_tokens - len(generation.tokens))
        if choice.first_written is not None:
            prefill = choice.first_written - generation.submitted - stats.queue_seconds
            decode = choice.last_written - choice.first_written
            record(metrics.PREFILL_TIME, prefill)
            record(metrics.DECODE_TIME, decode)
            record(metrics.INFERENCE_TIME, prefill + decode)
            if stats.generated_tokens > 1:
                record(metrics.TIME_PER_OUTPUT_TOKEN, decode / (stats.generated_tokens - 1))
        record(metrics.DRAFTS, stats.steps)
        record(metrics.DRAFT_TOKENS, stats.drafted)
        record(metrics.ACCEPTED_TOKENS, stats.accepted)
        for position, share in enumerate(stats.acceptance_per_position):
            record(metrics.ACCEPTED_PER_POSITION, round(share * stats.steps), position)
        record(metrics.PASSES, stats.passes)

    def _record(self, metric: metrics.Metric, value: float, *labels: object) -> None:
        self._sink.record(metric, value, self._model, *labels)
