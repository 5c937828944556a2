"""The JSON body of a request: parsed and validated in a bounded time, and off the event loop where it is large."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from email.message import Message
from functools import partial
from typing import Any, TypeVar, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from pass_server.errors import ApiError, of_validation
from pass_server.service import Service

M = TypeVar("M", bound=BaseModel)
SHORT_BODY = 1 << 12
"""Bytes. Bodies up to this size are parsed where they are: that takes less time than a thread."""
MAX_PARTS = 1 << 16
"""The most objects, their fields and lists in a body, together. Python makes them while nothing else runs."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class BodyRoute(APIRoute):
    """A route whose endpoint is called with the validated body and the `Request`. FastAPI itself would validate the
    body in the event loop."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        model = cast(type[BaseModel], self.body_field.field_info.annotation)

        async def handle(request: Request) -> Response:
            body = await request.body()
            if not _is_json(request.headers.get("content-type", "")):
                raise ApiError("the body must be a JSON object, sent as application/json")
            work = partial(parse_body, model, body)
            service: Service = request.app.state.service
            parsed = work() if len(body) <= SHORT_BODY else await service.read(work, len(body))
            response: Response = await self.endpoint(parsed, request)
            return response

        return handle


def parse_body(model: type[M], body: bytes) -> M:
    """The body as a `model`. ApiError names the first field that is wrong."""
    if _parts(body) > MAX_PARTS and _parts(_STRING.sub(b"", body)) > MAX_PARTS:
        raise ApiError(f"the body has more than {MAX_PARTS} objects, fields and lists", code="body_too_large")
    try:
        value = from_json(body, allow_inf_nan=False)  # up to five times as fast as `json`, which holds others up less
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise of_validation(error) from None


def _parts(body: bytes) -> int:
    """How many objects, fields and lists there are, or more where strings hold their marks."""
    return body.count(b"[") + body.count(b"{") + body.count(b":")


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
