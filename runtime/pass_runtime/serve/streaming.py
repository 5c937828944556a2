"""Answers over ASGI: whole, or as server-sent events. A client that goes away ends its request either way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pass_runtime.serve.errors import as_api_error
from pass_runtime.serve.forms import Choice, Form, Json, usage
from pass_runtime.serve.handlers import as_response
from pass_runtime.serve.jobs import Asked
from pass_runtime.serve.service import Event, Service

DONE = b"data: [DONE]\n\n"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


class Answer(Response):
    """Decodes while it is sent. stream: as events; include_usage: with a last one that counts tokens."""

    def __init__(self, service: Service, asked: Asked, form: Form, *, stream: bool, include_usage: bool) -> None:
        self.background, self.status_code = None, 200
        self._service, self._asked, self._form = service, asked, form
        self._stream, self._include_usage = stream, include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            started = False
            try:
                async with asyncio.timeout(self._service.options.request_seconds):
                    async with AsyncExitStack() as stack:
                        choices = await stack.enter_async_context(self._service.job(self._asked))
                        events = await stack.enter_async_context(aclosing(self._service.events(choices)))
                        if not self._stream:
                            async for _ in events:
                                pass
                            response: Response = JSONResponse(self._form.whole(choices, self._usage(choices)))
                            await response(scope, receive, send)
                            return
                        first = await anext(events)  # what fails before it is refused with a status of its own
                        await send(_start())
                        started = True
                        await self._send_events(choices, first, events, send)
            except Exception as error:
                told = as_api_error(error)
                if not started:
                    await as_response(told)(scope, receive, send)
                    return
                await _send(send, _event(told.body))
            await _send(send, DONE, more=False)

        await _unless_gone(work(), receive)

    async def _send_events(self, choices: list[Choice], first: Event, events: AsyncIterator[Event], send: Send) -> None:
        for choice in choices:
            for told in self._form.opening(choice):
                await self._send_chunk(send, [told])
        await self._send_one(send, *first)
        async for choice, piece in events:
            await self._send_one(send, choice, piece)
        if self._include_usage:
            await _send(send, _event(self._form.chunk([]) | {"usage": self._usage(choices)}))

    async def _send_one(self, send: Send, choice: Choice, piece: Any) -> None:
        for told in [self._form.ending(choice)] if piece is None else self._form.piece(choice, piece):
            await self._send_chunk(send, [told])

    async def _send_chunk(self, send: Send, choices: list[Json]) -> None:
        await _send(send, _event(self._form.chunk(choices) | ({"usage": None} if self._include_usage else {})))

    def _usage(self, choices: list[Choice]) -> Json:
        return usage(self._asked.prompt_tokens, self._asked.n, choices)


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Cancel `work` where the client disconnects."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait({working})
    if not working.cancelled():
        working.result()


def _event(content: Json) -> bytes:
    return b"data: " + _JSON.encode(content).encode() + b"\n\n"


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
