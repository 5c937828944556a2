"""ASGI middleware: paths and methods that mean the same, the log, API keys, the limits on
connections and bodies. Also the responses of errors."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pass_server.api_error import ApiError
from pass_server.content_encoding import expanded, too_large
from pass_server.metrics import HTTP_RESPONSES, MetricSink


def as_response(error: ApiError) -> Response:
    # It is ASCII, since a message may quote a lone surrogate, which UTF-8 cannot hold.
    content = json.dumps(error.body)
    return Response(content, error.status, error.headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Turn exceptions that endpoints raise into responses."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return as_response(error)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return as_response(ApiError(str(error.detail), error.status_code, headers=error.headers))

    @app.exception_handler(Exception)
    async def bug(_: Request, __: Exception) -> Response:  # starlette logs it
        return as_response(ApiError("internal error", 500))


log = logging.getLogger("pass_server")
KEYLESS_PATHS = ("/", "/health", "/ready", "/metrics", "/openapi.json")
"""Paths that need no key: nothing in them comes from prompts or answers."""
LOGGED_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT")
"""Other methods are logged as OTHER."""
LOGGED_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"),
    *("/tokenize", "/detokenize", *KEYLESS_PATHS),
)
"""Other paths are logged as "other"."""


def app_path(scope: Scope) -> str:
    """The path, relative to where the app is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


class TrailingSlash:
    """Drops slashes at the end of a path. No request is redirected: behind a proxy the server does
    not know its own address, and clients do not send a body again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and app_path(scope).strip("/"):
            # The scope is changed in place, because the connection's log and limits read it, too.
            scope["path"] = scope["path"].rstrip("/")
            if scope.get("raw_path"):
                scope["raw_path"] = scope["raw_path"].rstrip(b"/")
        await self._app(scope, receive, send)


class HeadAsGet:
    """Answers HEAD as GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class Options:
    """Answers OPTIONS with the methods of a path; `CORSMiddleware` does so for other origins."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            routes = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
            methods = {each for route in routes for each in getattr(route, "methods", None) or ()}
            if methods:
                allowed = sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set()))
                await Response(None, 204, {"Allow": ", ".join(allowed)})(scope, receive, send)
                return
        await self._app(scope, receive, send)


CONNECTION = "connection"
"""The key of a request's `LimitedConnection` in its ASGI state. Only `server` sets one."""


class LimitedConnection(Protocol):
    """What `server.Connection` does for a request."""

    def admit(self) -> bool:
        """Note that the request is admitted. Returns False if connections are too many."""


class ResponseLog:
    """Counts responses and logs one line about each, without any prompt or answer in it."""

    def __init__(self, app: ASGIApp, model: str, sink: MetricSink) -> None:
        self._app, self._model, self._sink = app, model, sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 499  # that of nginx for a client that disconnects before the response

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except BaseException:
            status = 500
            raise
        finally:
            path = _logged_path(scope)
            self._sink.record(HTTP_RESPONSES, 1, self._model, path, status)
            level = logging.INFO if path.startswith("/v1/") or path == "other" else logging.DEBUG
            method = scope["method"] if scope["method"] in LOGGED_METHODS else "OTHER"
            log.log(level, "%s %s %d %.3fs", method, path, status, time.perf_counter() - started)


class Admission:
    """Refuses requests without a valid key, if the server has keys, and requests beyond the limit
    of connections. Those for KEYLESS_PATHS always pass: a busy server must answer probes. Adds
    `client` to the state of the others: the digest of the key, "" if the server has no keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] == "http" and app_path(scope) not in KEYLESS_PATHS:
            error = self._admit(scope)
        app: ASGIApp = self._app if error is None else as_response(error)
        await app(scope, receive, send)

    def _admit(self, scope: Scope) -> ApiError | None:
        """Set `client`, and tell the connection. Returns why the request is refused, or None."""
        key_digest = self._key_digest(scope)
        if self._keys and key_digest is None:
            return ApiError(
                "a valid API key is needed: Authorization: Bearer KEY",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        state = scope.setdefault("state", {})
        state["client"] = key_digest or ""
        connection: LimitedConnection | None = state.get(CONNECTION)
        if connection is None or connection.admit():
            return None
        return ApiError(
            "this server has reached its limit of connections: try again later",
            503,
            code="too_many_connections",
            headers={"Retry-After": "1", "Connection": "close"},
        )

    def _key_digest(self, scope: Scope) -> str | None:
        """The digest of the request's key in hexadecimal; None if the key is not valid."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        digest = _digest(key.strip())
        # All keys are compared, so that the time tells nothing about them.
        equal = [hmac.compare_digest(digest, known) for known in self._keys]
        return digest.hex() if scheme.lower() == b"bearer" and any(equal) else None


class BodyLimit:
    """Reads the whole body of a request before the app runs: at most `max_bytes`, also after a
    compressed body is expanded, and within `seconds`."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
            encoding = Headers(scope=scope).get("content-encoding")
            if body and encoding:
                body = expanded(body, encoding, self._max_bytes)
        except TimeoutError:
            problem, headers = "the body did not arrive in time", {"Connection": "close"}
            error = ApiError(problem, 408, code="timeout", headers=headers)
            await as_response(error)(scope, receive, send)
        except ApiError as error:
            await as_response(error)(scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if the client disconnected."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_bytes:
                raise too_large(self._max_bytes)
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)


def _logged_path(scope: Scope) -> str:
    """The path in logs and metrics: "other" unless in LOGGED_PATHS, lest clients write there."""
    return route if (route := app_path(scope)) in LOGGED_PATHS else "other"


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, then the messages of the original `receive`."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return left.pop() if left else await receive()

    return replay


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
