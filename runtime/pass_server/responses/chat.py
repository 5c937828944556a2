"""A request of /v1/responses as the chat with the same prompt and options."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from pass_server.choices import Json
from pass_server.errors import ApiError, not_supported, of_validation
from pass_server.fields import unsupported
from pass_server.responses.messages import Messages
from pass_server.responses.schemas import WHY, NamedFunction, ResponsesRequest, TextFormat
from pass_server.schemas import ChatRequest, Drawn

_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of a chat that are called otherwise here, besides `messages`."""


class AsChat:
    """A request, checked, and its chat. `own` says what is wrong with the chat in the names of the request. ApiError
    where something cannot be honoured."""

    def __init__(self, request: ResponsesRequest) -> None:
        _check(request)
        self.echo = _echo(request)
        self._messages = Messages(request.instructions)
        self._messages.add(request.input)
        try:
            self.chat = ChatRequest.model_validate(_fields(request) | {"messages": self._messages.found})
        except ValidationError as error:
            raise self.own(of_validation(error)) from None

    def own(self, error: ApiError) -> ApiError:
        """An error about the chat as one about the request."""
        message, param = error.message, error.param
        if param is not None:
            param = _NAMES.get(param) or self._messages.own_name(param)
            message = message.replace(error.param or "", param)
        for name, own in _NAMES.items():
            message = message.replace(name, own)
        return ApiError(message, error.status, param=param, code=error.code, headers=error.headers)


def _check(request: ResponsesRequest) -> None:
    for where, fields in _groups(request):
        if (name := unsupported(fields)) is not None:
            raise not_supported(where + name, getattr(fields, name), WHY.get(where + name, ""))
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options are for streams: set stream to true", param="stream_options")
    form = _format(request)
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        raise ApiError("text.format has a schema where its type is json_schema, and only there", param="text.format")


def _groups(request: ResponsesRequest) -> Iterator[tuple[str, BaseModel]]:
    """The fields of a request, and of the objects in it that have fields, with what their paths begin with."""
    yield "", request
    for name in ("text", "reasoning", "stream_options"):
        if (fields := getattr(request, name)) is not None:
            yield f"{name}.", fields


def _format(request: ResponsesRequest) -> TextFormat | None:
    return None if request.text is None else request.text.format


def _fields(request: ResponsesRequest) -> dict[str, Any]:
    """Those of the chat but for its messages."""
    same = (*Drawn.model_fields, "tool_choice", "parallel_tool_calls", "chat_template_kwargs")
    found = {name: getattr(request, name) for name in same}
    found["max_completion_tokens"] = request.max_output_tokens
    if isinstance(request.tool_choice, NamedFunction):
        found["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    if request.tools is not None:
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in request.tools]
        found["tools"] = [{"type": "function", "function": function} for function in functions]
    if (form := _format(request)) is not None:
        schema = {} if form.json_schema is None else {"json_schema": {"schema": form.json_schema}}
        found["response_format"] = {"type": form.type, **schema}
    return found


def _echo(request: ResponsesRequest) -> Json:
    """What the answer repeats of the request. ApiError where it cannot."""
    form = _format(request)
    chosen = request.tool_choice
    found: Json = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": chosen.model_dump() if isinstance(chosen, NamedFunction) else chosen or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_p": 1.0 if request.top_p is None else request.top_p,
    }
    for name, value in found.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:  # a lone surrogate, or a number that JSON does not have
            raise ApiError(f"{name} cannot be repeated as JSON in UTF-8", param=name) from None
    return found
