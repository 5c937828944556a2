"""Sends answers over ASGI, whole or as a stream, while their sequences are decoded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from pass_runtime import Piece
from pass_server.answers import Choice, ChoicesFormatter, Json, usage_field
from pass_server.api_error import ApiError, as_api_error
from pass_server.middleware import as_response
from pass_server.request import ParsedRequest
from pass_server.responses_output import ResponsesFormatter
from pass_server.service import ChoicePiece, Service

Formatter = ChoicesFormatter | ResponsesFormatter
ERROR_SEND_SECONDS = 5.0
"""How long it may take to send a client the error that ended its request."""
HEAD_SECONDS = 0.5
"""How long the head of a stream waits for the first pass: if it fails, the response has an error
status, after which clients try again."""
COMMENT = b": keep-alive\n\n"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class GenerationResponse(Response):
    """A response that decodes its request while it is sent. stream: whether it is a stream."""

    def __init__(
        self, service: Service, parsed: ParsedRequest, formatter: Formatter, *, stream: bool
    ) -> None:
        self.background, self.status_code = None, 200
        self._service, self._request = service, parsed
        self._formatter, self._stream = formatter, stream
        self._keep_alive_seconds = service.options.keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            await send(message)
            # Not reached if the time limit cancels a `send` to a client that does not read.
            started = True

        async def work() -> None:
            try:
                async with self._service.time_limit(self._request.arrived):
                    await self._answer(scope, receive, send, send_noted)
            except Exception as error:
                # If the client does not read the error, uvicorn closes the incomplete response.
                with suppress(TimeoutError):
                    async with asyncio.timeout(ERROR_SEND_SECONDS):
                        await self._send_error(as_api_error(error), started, scope, receive, send)

        await _cancel_on_disconnect(work(), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, send_start: Send) -> None:
        """Decode the request and send its answer. send_start: notes that the response has begun."""
        service = self._service
        async with AsyncExitStack() as stack:
            # This has to be asked before the request itself takes slots.
            has_room = self._stream and service.has_room(len(self._request.requests))
            choices = await stack.enter_async_context(service.decode(self._request))
            pieces = await stack.enter_async_context(aclosing(service.pieces(choices)))
            if not self._stream:
                async for _ in pieces:
                    pass
                best = best_choices(choices, self._request.per_prompt, self._request.n)
                answer = JSONResponse(self._formatter.whole(best, self._usage(choices)))
                await answer(scope, receive, send_start)
                return
            first = await stack.enter_async_context(
                _first(pieces, HEAD_SECONDS if has_room else 0.0)
            )
            # A new message each time: middleware adds headers to it.
            start = {"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]}
            await send_start(start)
            stream = _EventStream(send, self._keep_alive_seconds)
            async with stream.kept_alive():
                await self._send_events(choices, first, pieces, stream.send)
        await _send(send, self._formatter.done, more=False)

    async def _send_error(
        self, error: ApiError, started: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send a response, or an event if a stream has begun."""
        if not started:
            await as_response(error)(scope, receive, send)
        elif self._stream:
            await _send(send, self._formatter.failure(error))
            await _send(send, self._formatter.done, more=False)

    async def _send_events(
        self,
        choices: list[Choice],
        first: Awaitable[ChoicePiece],
        pieces: AsyncIterator[ChoicePiece],
        send: Send,
    ) -> None:
        for choice in choices:
            for content in self._formatter.opening(choice):
                await _send(send, self._formatter.event(content))
        await self._send_piece(send, *await first)
        async for choice, piece in pieces:
            await self._send_piece(send, choice, piece)
        await _send(send, self._formatter.closing(choices, self._usage(choices)))

    async def _send_piece(self, send: Send, choice: Choice, piece: Piece | None) -> None:
        formatter = self._formatter
        contents = formatter.ending(choice) if piece is None else formatter.piece(choice, piece)
        for content in contents:
            await _send(send, formatter.event(content))

    def _usage(self, choices: list[Choice]) -> Json:
        return usage_field(self._request.prompt_tokens, self._request.per_prompt, choices)


def best_choices(choices: Sequence[Choice], per_prompt: int, n: int) -> list[Choice]:
    """Return the `n` likeliest of each prompt's `per_prompt` choices, best first and renumbered."""
    if per_prompt == n:
        return list(choices)
    by_prompt = [choices[i : i + per_prompt] for i in range(0, len(choices), per_prompt)]
    best = [
        choice
        for group in by_prompt
        for choice in sorted(group, key=lambda each: -each.mean_logprob)[:n]
    ]
    return [replace(choice, index=i) for i, choice in enumerate(best)]


@asynccontextmanager
async def _first(
    pieces: AsyncIterator[ChoicePiece], seconds: float
) -> AsyncIterator[Awaitable[ChoicePiece]]:
    """Yield a task for the first piece, once it has come or `seconds` have passed. Raises the error
    of a pass that fails until then."""

    async def next_piece() -> ChoicePiece:
        return await anext(pieces)

    first = asyncio.create_task(next_piece())
    try:
        await asyncio.wait({first}, timeout=seconds)
        if first.done():
            first.result()
        yield first
    finally:
        first.cancel()
        await asyncio.wait({first})
        if not first.cancelled():
            first.exception()  # asyncio reports an exception that nobody asks for.


class _EventStream:
    """Sends the body of a stream, and a comment whenever nothing was sent for `seconds`, or proxies
    might close the stream."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._lock = asyncio.Lock()
        self._sent_at = time.monotonic()

    async def send(self, message: Message) -> None:
        async with self._lock:
            await self._send(message)
        self._sent_at = time.monotonic()

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        comments = asyncio.create_task(self._send_comments())
        try:
            yield
        finally:
            comments.cancel()
            await asyncio.wait({comments})

    async def _send_comments(self) -> None:
        while True:
            quiet_left = self._sent_at + self._seconds - time.monotonic()
            if quiet_left > 0:
                await asyncio.sleep(quiet_left)
            else:
                await _send(self.send, COMMENT)


async def _cancel_on_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({working})
    if not working.cancelled():
        working.result()


async def _send(send: Callable[[Any], Awaitable[None]], body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
