"""ASGI middleware: paths, methods, the log, API keys and bodies. Also the responses of errors."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import json
import logging
import re
import time
import zlib
from collections.abc import Callable, Sequence

import zstandard
from fastapi import FastAPI, Request, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pass_server.api_error import ApiError
from pass_server.metrics import HTTP_RESPONSES, MetricSink

log = logging.getLogger("pass_server")
KEYLESS_PATHS = ("/", "/health", "/ready", "/metrics", "/openapi.json")
"""Paths that need no key: what they return holds nothing of prompts or answers."""
LOGGED_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT")
LOGGED_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models"),
    *("/tokenize", "/detokenize", *KEYLESS_PATHS),
)
"""The paths that log and metrics name; clients could fill both with others."""
MAX_ZSTD_WINDOW = 1 << 23
"""The bytes of the largest zstd window that a client may use over HTTP (RFC 9659)."""
_ORIGIN = re.compile(r"^https?://[^/]*", re.IGNORECASE)


def as_response(error: ApiError) -> Response:
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


def app_path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


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


class RequestTarget:
    """Makes a path of a target that is a whole URL, and drops slashes at its end. Answers HEAD as
    GET without the body, and OPTIONS with the methods of a path."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute] = ()) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The log reads the same scope, so it is changed and not copied.
        scope["path"] = _ORIGIN.sub("", scope["path"]) or "/"
        if app_path(scope).strip("/"):
            scope["path"] = scope["path"].rstrip("/")
        scope["raw_path"] = None  # It is optional, and nothing reads it.
        if scope["method"] == "OPTIONS" and (methods := self._methods(scope)):
            allowed = methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set())
            headers = {"Allow": ", ".join(sorted(allowed))}
            await Response(None, 204, headers)(scope, receive, send)
            return
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)

    def _methods(self, scope: Scope) -> set[str]:
        routes = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
        return {each for route in routes for each in getattr(route, "methods", None) or ()}


class Admission:
    """Refuses requests without a valid key, if the server has keys, except those for KEYLESS_PATHS.
    The state of all others gets `client`, the digest of the key, by which the prefix cache tells
    clients apart."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and app_path(scope) not in KEYLESS_PATHS:
            client = self._key_digest(scope) if self._keys else ""
            scope.setdefault("state", {})["client"] = client
            if client is None:
                app = as_response(
                    ApiError(
                        "a valid API key is needed: Authorization: Bearer KEY",
                        401,
                        code="invalid_api_key",
                        headers={"WWW-Authenticate": "Bearer"},
                    )
                )
        await app(scope, receive, send)

    def _key_digest(self, scope: Scope) -> str | None:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # All keys are compared, so that the response time tells nothing about them.
        matches = [hmac.compare_digest(digest, valid) for valid in self._keys]
        return digest.hex() if scheme.lower() == b"bearer" and any(matches) else None


class BodyLimit:
    """Reads the whole body of a request, within `seconds`, before the app runs. It may have at most
    `max_bytes`, also when it is expanded."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive)
            if body and (encoding := Headers(scope=scope).get("content-encoding")):
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
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_bytes:
                raise _too_large(self._max_bytes)
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return unread.pop() if unread else await receive()

    return replay


def expand(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the expanded body. Raises ApiError if it is not in this Content-Encoding, or expands
    to more than `max_bytes`; no more than that is expanded."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in DECODERS:
        raise ApiError(
            f"Content-Encoding {encoding!r} is not supported by this server: send gzip, zstd "
            "or no encoding",
            415,
            code="unsupported_encoding",
            headers={"Accept-Encoding": "gzip, zstd"},
        )
    try:
        content = DECODERS[name](body, max_bytes + 1)
    except (zlib.error, zstandard.ZstdError, EOFError):
        problem = f"the body is not {name}, or is cut off, but its Content-Encoding is {name}"
        raise ApiError(problem, code="invalid_encoding") from None
    if len(content) > max_bytes:
        raise _too_large(max_bytes)
    return content


def _too_large(max_bytes: int) -> ApiError:
    problem = f"the body has more than {max_bytes} bytes, the limit of this server; send less"
    return ApiError(problem, 413, code="body_too_large", headers={"Connection": "close"})


def _gzip(body: bytes, max_bytes: int) -> bytes:
    """Expand up to `max_bytes` of a body, which may have several members."""
    parts: list[bytes] = []
    while body and max_bytes:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: with gzip's header
        parts.append(member.decompress(body, max_bytes))
        max_bytes -= len(parts[-1])
        if max_bytes and not member.eof:
            raise EOFError
        body = member.unused_data
    return b"".join(parts)


def _zstd(body: bytes, max_bytes: int) -> bytes:
    """Expand up to `max_bytes` of a body, which may have several frames."""
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW)
    with decoder.stream_reader(io.BytesIO(body), read_across_frames=True) as frames:
        return frames.read(max_bytes)


DECODERS: dict[str, Callable[[bytes, int], bytes]] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}
