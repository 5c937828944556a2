"""ASGI middleware, through which requests come to the app: it unifies paths and methods, counts and
logs responses, checks API keys, and limits connections and bodies. Also the responses of errors."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import time
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pass_server.api_error import ApiError
from pass_server.content_encoding import expand, too_large
from pass_server.metrics import HTTP_RESPONSES, MetricSink


def as_response(error: ApiError) -> Response:
    """Return the response for an error."""
    # The JSON is ASCII, since a message may quote a lone surrogate, which UTF-8 cannot hold.
    content = json.dumps(error.body)
    return Response(content, error.status, error.headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Make the app turn exceptions that endpoints raise into responses."""

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
"""Paths that need no key: what they return holds nothing of prompts or answers."""
LOGGED_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT")
"""The methods that the log names; all others are logged as OTHER."""
LOGGED_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"),
    *("/tokenize", "/detokenize", *KEYLESS_PATHS),
)
"""The paths that log and metrics name. All others are "other", or clients could fill both."""


def app_path(scope: Scope) -> str:
    """Return the path of a request, relative to where the app is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


_ORIGIN = re.compile(r"^https?://[^/]*", re.IGNORECASE)


class RequestTarget:
    """Makes a path of a request's target, if this is a whole URL, and drops slashes at its end. A
    redirect would not do: behind a proxy the server does not know its own address, and clients do
    not send a body again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # uvicorn and the log read the same scope, so it is changed and not copied.
            scope["path"] = _ORIGIN.sub("", scope["path"]) or "/"
            if app_path(scope).strip("/"):
                scope["path"] = scope["path"].rstrip("/")
            scope["raw_path"] = None  # It is optional, and nothing reads it.
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


class OptionsMethod:
    """Answers OPTIONS with the methods of a path; `CORSMiddleware` answers it for other origins."""

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
"""The key of a request's `server.Connection` in its ASGI state, which only `server.py` sets."""


class ResponseLog:
    """Counts responses and logs one line about each, without any prompt or answer in it."""

    def __init__(self, app: ASGIApp, model: str, sink: MetricSink) -> None:
        self._app, self._model, self._sink = app, model, sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 499  # what nginx logs if the client disconnects before the response

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except BaseException:
            status = 500
            raise
        finally:
            path = app_path(scope)
            path = path if path in LOGGED_PATHS else "other"
            self._sink.record(HTTP_RESPONSES, 1, self._model, path, status)
            level = logging.INFO if path.startswith("/v1/") or path == "other" else logging.DEBUG
            method = scope["method"] if scope["method"] in LOGGED_METHODS else "OTHER"
            log.log(level, "%s %s %d %.3fs", method, path, status, time.perf_counter() - started)


class Admission:
    """Refuses requests without a valid key if the server has keys, and requests on a connection
    that is one too many. Requests for KEYLESS_PATHS always pass, since a busy server must answer
    probes. The state of all others gets `client`, by which the prefix cache tells clients apart:
    the digest of the request's key, or "" if the server has no keys.
    """

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
        """Set `client`, and let the connection admit the request. Return the error of a refusal."""
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
        connection = state.get(CONNECTION)
        if connection is None or connection.admit():
            return None
        return ApiError(
            "this server has reached its limit of connections: try again later",
            503,
            code="too_many_connections",
            headers={"Retry-After": "1", "Connection": "close"},
        )

    def _key_digest(self, scope: Scope) -> str | None:
        """Return the digest of the request's key in hexadecimal; None if the key is not valid."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        digest = _digest(key.strip())
        # All keys are compared, so that the response time tells nothing about them.
        matches = [hmac.compare_digest(digest, valid) for valid in self._keys]
        return digest.hex() if scheme.lower() == b"bearer" and any(matches) else None


class BodyLimit:
    """Reads the whole body of a request, within `seconds`, before the app runs. Neither the body
    nor what a compressed body expands to may have more than `max_bytes`."""

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
                body = expand(body, encoding, self._max_bytes)
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
        """Return the body; None if the client disconnected. Raises ApiError if it is too large."""
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


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the app the body, then what the original `receive` gives."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
