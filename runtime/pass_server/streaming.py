"""Answers over ASGI, whole or as server-sent events. A request is cancelled if its client
disconnects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from pass_server.api_error import ApiError, as_api_error
from pass_server.choices import Choice, Json, best_choices, usage
from pass_server.formatters import ResponseFormatter
from pass_server.middleware import as_response
from pass_server.parsed_request import ParsedRequest
from pass_server.service import ChoicePiece, Service

ERROR_SEND_SECONDS = 5.0
"""How long it may take to send a client the error that ended its request."""
HEAD_SECONDS = 0.5
"""A stream that has a slot gets its head with its first pass, or after so long: if that pass fails,
the error has an HTTP status, after which clients try again. One that waits for a slot gets its head
at once."""
COMMENT = b": keep-alive\n\n"


class GenerationResponse(Response):
    """A response that decodes a request while it is sent. stream: whether as server-sent events."""

    def __init__(
        self, service: Service, parsed: ParsedRequest, formatter: ResponseFormatter, *, stream: bool
    ) -> None:
        self.background, self.status_code = None, 200
        self._service, self._request, self._formatter, self._stream = (
            service,
            parsed,
            formatter,
            stream,
        )
        self._keep_alive_seconds = service.options.keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            # Waits first if the client does not read; if it is cancelled then, it
            # sent nothing.
            await send(message)
            started = True

        async def work() -> None:
            left = (
                self._request.arrived + self._service.options.request_seconds - time.perf_counter()
            )
            try:
                async with asyncio.timeout(left):
                    async with AsyncExitStack() as stack:
                        head_seconds = (
                            HEAD_SECONDS
                            if self._service.has_room(len(self._request.requests))
                            else 0.0
                        )
                        choices = await stack.enter_async_context(
                            self._service.decode(self._request)
                        )
                        events = await stack.enter_async_context(
                            aclosing(self._service.events(choices))
                        )
                        if not self._stream:
                            async for _ in events:
                                pass
                            kept = best_choices(choices, self._request.per_prompt, self._request.n)
                            response: Response = JSONResponse(
                                self._formatter.whole(kept, self._usage(choices))
                            )
                            await response(scope, receive, send_noted)
                            return
                        first = await stack.enter_async_context(_first(events, head_seconds))
                        await send_noted(_start())
                        stream = _EventStream(send, self._keep_alive_seconds)
                        async with stream.kept_alive():
                            await self._send_events(choices, first, events, stream.send)
                    await _send(send, self._formatter.done, more=False)
            except Exception as error:
                # The client does not read, and the server closes the incomplete
                # response.
                with suppress(TimeoutError):
                    async with asyncio.timeout(ERROR_SEND_SECONDS):
                        await self._send_error(as_api_error(error), started, scope, receive, send)

        await _cancel_on_disconnect(work(), receive)

    async def _send_error(
        self, error: ApiError, started: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send a response, or an event if a stream has begun. A whole answer that has begun cannot
        carry an error."""
        if not started:
            await as_response(error)(scope, receive, send)
        elif self._stream:
            await _send(send, self._formatter.failure(error))
            await _send(send, self._formatter.done, more=False)

    async def _send_events(
        self,
        choices: list[Choice],
        first: Awaitable[ChoicePiece],
        events: AsyncIterator[ChoicePiece],
        send: Send,
    ) -> None:
        for choice in choices:
            for shown in self._formatter.opening(choice):
                await _send(send, self._formatter.event(shown))
        await self._send_one(send, *await first)
        async for choice, piece in events:
            await self._send_one(send, choice, piece)
        await _send(send, self._formatter.closing(choices, self._usage(choices)))

    async def _send_one(self, send: Send, choice: Choice, piece: Any) -> None:
        for shown in (
            self._formatter.ending(choice)
            if piece is None
            else self._formatter.piece(choice, piece)
        ):
            await _send(send, self._formatter.event(shown))

    def _usage(self, choices: list[Choice]) -> Json:
        return usage(self._request.prompt_tokens, self._request.per_prompt, choices)


@asynccontextmanager
async def _first(
    events: AsyncIterator[ChoicePiece], seconds: float
) -> AsyncIterator[Awaitable[ChoicePiece]]:
    """The first event, once it has come or `seconds` are over. Raises its error if that comes
    sooner. Leaving the context cancels it."""

    async def next_event() -> ChoicePiece:
        return await anext(events)

    first = asyncio.create_task(next_event())
    try:
        await asyncio.wait({first}, timeout=seconds)
        if first.done():
            first.result()
        yield first
    finally:
        first.cancel()
        await asyncio.wait({first})
        if not first.cancelled():
            first.exception()  # or asyncio reports that nobody asked for it


class _EventStream:
    """Sends the body of a stream, and a comment if nothing was sent for `seconds`, so that no proxy
    takes the stream for dead while its request waits."""

    def __init__(self, send: Send, seconds: float) -> None:
        self._send, self._seconds = send, seconds
        self._sending = asyncio.Lock()
        self._sent_at = time.monotonic()

    async def send(self, message: Message) -> None:
        async with self._sending:
            await self._send(message)
        self._sent_at = time.monotonic()

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Comments are sent within this context."""
        comments = asyncio.create_task(self._send_comments())
        try:
            yield
        finally:
            comments.cancel()
            await asyncio.wait({comments})

    async def _send_comments(self) -> None:
        while True:
            left = self._sent_at + self._seconds - time.monotonic()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await _send(self.send, COMMENT)


async def _cancel_on_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work`, and cancel it if the client disconnects."""

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


def _start() -> dict[str, Any]:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }


async def _send(send: Callable[[Any], Awaitable[None]], body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
