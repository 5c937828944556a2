"""Errors as HTTP responses in OpenAI's shape, those that FastAPI raises too."""

from __future__ import annotations

import json

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from pass_server.errors import ApiError


def as_response(error: ApiError) -> Response:
    content = json.dumps(error.body)  # in ASCII, since a message may quote a lone surrogate, which UTF-8 cannot hold
    return Response(content, error.status, error.headers, media_type="application/json")


def add_handlers(app: FastAPI) -> None:
    """Handlers for what endpoints raise before their response has begun."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return as_response(error)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return as_response(ApiError(str(error.detail), error.status_code, headers=error.headers))

    @app.exception_handler(Exception)
    async def bug(_: Request, __: Exception) -> Response:  # starlette logs it
        return as_response(ApiError("internal error", 500))
