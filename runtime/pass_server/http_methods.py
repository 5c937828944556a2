"""ASGI middleware for requests that mean the same: paths with and without a slash at the end, HEAD as GET; OPTIONS."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def app_path(scope: Scope) -> str:
    """The path, relative to where the app is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


class TrailingSlash:
    """Drops slashes at the end of a path. No request is redirected: behind a proxy the server does not know its own
    address, and clients do not send a body again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/") and app_path(scope).strip("/"):
            scope["path"] = scope["path"].rstrip("/")  # in place: the connection's log and limits read it, too
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
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class Options:
    """Answers OPTIONS with the methods of a path. Requests from other origins are `CORSMiddleware`'s."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            found = [route for route in self._routes if route.matches(scope)[0] is not Match.NONE]
            methods = {method for route in found for method in getattr(route, "methods", None) or ()}
            if methods:
                allowed = sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set()))
                await Response(None, 204, {"Allow": ", ".join(allowed)})(scope, receive, send)
                return
        await self._app(scope, receive, send)
