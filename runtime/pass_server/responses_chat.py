"""A request of /v1/responses as the chat with the same prompt and options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from pass_server.api_error import ApiError, not_supported, of_validation
from pass_server.choices import Json
from pass_server.fields import Content, ContentPart, unsupported
from pass_server.responses_fields import (
    WHY,
    CallItem,
    InputItem,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
    ResultItem,
    TextFormat,
)
from pass_server.schemas import ChatRequest, Drawn

Message = dict[str, Any]
_ITEM_NAMES = {"tool_call_id": "call_id", "function.arguments": "arguments", "content": "content"}
"""Fields of messages and calls that an item has too, with the names that they have there."""


class Messages:
    """Messages, put together item by item. Thoughts, text and calls of the model that follow one another are one
    message, as chat templates expect them.

    found: the messages so far. places: the path of the item that a message, or a call in one, began with, by its own.
    """

    def __init__(self, instructions: str | None) -> None:
        self.found: list[Message] = []
        self.places: dict[str, str] = {}
        if instructions:
            self._begin({"role": "system", "content": instructions}, "instructions")

    def add(self, items: str | Sequence[InputItem]) -> None:
        """Raises ApiError, which says what is wrong with an item."""
        if isinstance(items, str):
            self._begin({"role": "user", "content": items}, "input")
            return
        for i, item in enumerate(items):
            where = f"input.{i}"
            if (name := unsupported(item)) is not None:
                raise not_supported(f"{where}.{name}", getattr(item, name))
            self._add(item, where)
        for message in self.found:
            if message["role"] == "assistant" and "tool_calls" not in message:
                message.setdefault("content", "")  # thoughts, and nothing after them

    def own_name(self, param: str) -> str:
        """The path in the request of what has the path `param` in the chat."""
        if param == "messages":
            return "input"
        parts = param.split(".")
        for size in (4, 2):
            if (place := self.places.get(".".join(parts[:size]))) is not None:
                name = _ITEM_NAMES.get(".".join(parts[size:])) if place.startswith("input.") else None
                return f"{place}.{name}" if name else place
        return param

    def _add(self, item: InputItem, where: str) -> None:
        if isinstance(item, ResultItem):
            content = _text(item.output, f"{where}.output")
            self._begin({"role": "tool", "tool_call_id": item.call_id, "content": content}, where)
        elif isinstance(item, CallItem):
            turn = self._turn(where)
            function = {"name": item.name, "arguments": item.arguments}
            calls = turn.setdefault("tool_calls", [])
            self.places[f"messages.{len(self.found) - 1}.tool_calls.{len(calls)}"] = where
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, ReasoningItem):
            thoughts = _text(item.content or [], f"{where}.content")
            turn = self._turn(where, "reasoning_content", "content", "tool_calls")
            turn["reasoning_content"] = "\n".join(part["text"] for part in thoughts)
        else:
            self._add_message(item, where)

    def _add_message(self, item: MessageItem, where: str) -> None:
        content = _text(item.content, f"{where}.content")
        if item.role == "assistant":
            self._turn(where, "content", "tool_calls")["content"] = content
        else:
            self._begin({"role": item.role, "content": content}, where)

    def _turn(self, where: str, *taken: str) -> Message:
        """The message of the model that is the last one, or a new one if there is none or it has one of `taken`."""
        if not self.found or self.found[-1]["role"] != "assistant" or any(name in self.found[-1] for name in taken):
            self._begin({"role": "assistant"}, where)
        return self.found[-1]

    def _begin(self, message: Message, where: str) -> None:
        self.places[f"messages.{len(self.found)}"] = where
        self.found.append(message)


def _text(content: Content, where: str) -> Any:
    """Content as that of a chat's message."""
    if isinstance(content, str):
        return content
    return [_part(part, where) for part in content]


def _part(part: ContentPart, where: str) -> dict[str, str]:
    known = part.type in ("input_text", "output_text", "reasoning_text") and part.text is not None
    if not known or set(part.model_extra or ()) - {"annotations", "logprobs"}:
        raise ApiError(
            f'{where} must be text, in parts such as {{"type": "input_text", "text": ...}}: this model reads text only',
            param=where,
            code="unsupported_content_part",
        )
    return {"type": "text", "text": part.text or ""}


_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of a chat that are called otherwise here, besides `messages`."""


class AsChat:
    """A request, checked, and its chat. `own` says what is wrong with the chat in the names of the request.
    Raises ApiError if something cannot be honoured."""

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
        raise ApiError("text.format has a schema if its type is json_schema, and only then", param="text.format")


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
    """What the answer repeats of the request. Raises ApiError if it cannot."""
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
