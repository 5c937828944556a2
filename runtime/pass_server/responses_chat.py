"""Converts a request of /v1/responses to a chat request with the same prompt and options."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from pass_server.api_error import ApiError, not_supported, validation_error
from pass_server.choices import Json
from pass_server.fields import Content, ContentPart, unsupported_field
from pass_server.responses_fields import (
    REFUSAL_REASONS,
    CallItem,
    InputItem,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
    ResultItem,
    TextFormat,
)
from pass_server.schemas import DEFAULT_TEMPERATURE, ChatRequest, CommonFields

Message = dict[str, Any]
_ITEM_FIELDS = {"tool_call_id": "call_id", "function.arguments": "arguments", "content": "content"}
"""Maps fields of a chat's message or call to fields of an item."""


class MessagesBuilder:
    """Builds chat messages from items. Consecutive reasoning, text and calls of the model become
    one message, as chat templates expect.

    messages: the messages so far. item_paths: maps the path of a message or call in the chat to
    the path of its first item.
    """

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Message] = []
        self.item_paths: dict[str, str] = {}
        if instructions:
            self._begin({"role": "system", "content": instructions}, "instructions")

    def add(self, items: str | Sequence[InputItem]) -> None:
        """Add messages. Raises ApiError if an item is invalid."""
        if isinstance(items, str):
            self._begin({"role": "user", "content": items}, "input")
            return
        for i, item in enumerate(items):
            path = f"input.{i}"
            if (name := unsupported_field(item)) is not None:
                raise not_supported(f"{path}.{name}", getattr(item, name))
            self._add(item, path)
        for message in self.messages:
            if message["role"] == "assistant" and "tool_calls" not in message:
                message.setdefault("content", "")  # reasoning with nothing after it

    def request_path(self, param: str) -> str:
        """The path in the request for the path `param` in the chat."""
        if param == "messages":
            return "input"
        parts = param.split(".")
        for size in (4, 2):
            if (path := self.item_paths.get(".".join(parts[:size]))) is not None:
                name = (
                    _ITEM_FIELDS.get(".".join(parts[size:])) if path.startswith("input.") else None
                )
                return f"{path}.{name}" if name else path
        return param

    def _add(self, item: InputItem, path: str) -> None:
        if isinstance(item, ResultItem):
            content = _chat_content(item.output, f"{path}.output")
            self._begin({"role": "tool", "tool_call_id": item.call_id, "content": content}, path)
        elif isinstance(item, CallItem):
            message = self._assistant_message(path)
            function = {"name": item.name, "arguments": item.arguments}
            calls = message.setdefault("tool_calls", [])
            self.item_paths[f"messages.{len(self.messages) - 1}.tool_calls.{len(calls)}"] = path
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, ReasoningItem):
            reasoning = _chat_content(item.content or [], f"{path}.content")
            message = self._assistant_message(path, "reasoning_content", "content", "tool_calls")
            message["reasoning_content"] = "\n".join(part["text"] for part in reasoning)
        else:
            self._add_message(item, path)

    def _add_message(self, item: MessageItem, path: str) -> None:
        content = _chat_content(item.content, f"{path}.content")
        if item.role == "assistant":
            self._assistant_message(path, "content", "tool_calls")["content"] = content
        else:
            self._begin({"role": item.role, "content": content}, path)

    def _assistant_message(self, path: str, *filled: str) -> Message:
        """The last message if it is the model's and has no field of `filled`, else a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(name in last for name in filled):
            self._begin({"role": "assistant"}, path)
        return self.messages[-1]

    def _begin(self, message: Message, path: str) -> None:
        self.item_paths[f"messages.{len(self.messages)}"] = path
        self.messages.append(message)


def _chat_content(content: Content, path: str) -> Any:
    """The content for a chat message."""
    if isinstance(content, str):
        return content
    return [_part(part, path) for part in content]


def _part(part: ContentPart, path: str) -> dict[str, str]:
    known = part.type in ("input_text", "output_text", "reasoning_text") and part.text is not None
    if not known or set(part.model_extra or ()) - {"annotations", "logprobs"}:
        raise ApiError(
            f'{path} must be text, in parts such as {{"type": "input_text", "text": ...}}: '
            "this model reads text only",
            param=path,
            code="unsupported_content_part",
        )
    return {"type": "text", "text": part.text or ""}


_REQUEST_FIELDS = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""Maps fields of a chat, except `messages`, to fields of /v1/responses with other names."""


class ChatConversion:
    """chat: a request of /v1/responses as a chat request. echo: the fields that the answer repeats.
    Raises ApiError if the request is invalid."""

    def __init__(self, request: ResponsesRequest) -> None:
        _check(request)
        self.echo = _echo(request)
        self._builder = MessagesBuilder(request.instructions)
        self._builder.add(request.input)
        try:
            self.chat = ChatRequest.model_validate(
                _fields(request) | {"messages": self._builder.messages}
            )
        except ValidationError as error:
            raise self.request_error(validation_error(error)) from None

    def request_error(self, error: ApiError) -> ApiError:
        """An error about the chat, with the field names of the request."""
        message, param = error.message, error.param
        if param is not None:
            param = _REQUEST_FIELDS.get(param) or self._builder.request_path(param)
            message = message.replace(error.param or "", param)
        for name, own_name in _REQUEST_FIELDS.items():
            message = message.replace(name, own_name)
        return ApiError(message, error.status, param=param, code=error.code, headers=error.headers)


def _check(request: ResponsesRequest) -> None:
    for path, fields in _groups(request):
        if (name := unsupported_field(fields)) is not None:
            why = REFUSAL_REASONS.get(path + name, "")
            raise not_supported(path + name, getattr(fields, name), why)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options are for streams: set stream to true", param="stream_options")
    wanted = _format(request)
    if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
        problem = "give text.format a schema if its type is json_schema, and none otherwise"
        raise ApiError(problem, param="text.format")


def _groups(request: ResponsesRequest) -> Iterator[tuple[str, BaseModel]]:
    """(prefix of its fields' paths, object) for each object of a request with fields to check."""
    yield "", request
    for name in ("text", "reasoning", "stream_options"):
        if (fields := getattr(request, name)) is not None:
            yield f"{name}.", fields


def _format(request: ResponsesRequest) -> TextFormat | None:
    return None if request.text is None else request.text.format


def _fields(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of the chat, except messages."""
    same = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
    found = {name: getattr(request, name) for name in (*CommonFields.model_fields, *same)}
    found["max_completion_tokens"] = request.max_output_tokens
    if isinstance(request.tool_choice, NamedFunction):
        found["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    if request.tools is not None:
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in request.tools]
        found["tools"] = [{"type": "function", "function": function} for function in functions]
    if (wanted := _format(request)) is not None:
        found["response_format"] = {"type": wanted.type}
        if wanted.json_schema is not None:
            found["response_format"]["json_schema"] = {"schema": wanted.json_schema}
    return found


def _echo(request: ResponsesRequest) -> Json:
    """The fields that the answer repeats. Raises ApiError if one cannot be sent as JSON."""
    wanted = _format(request)
    chosen = request.tool_choice
    found: Json = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": DEFAULT_TEMPERATURE if request.temperature is None else request.temperature,
        "text": {
            "format": {"type": "text"}
            if wanted is None
            else wanted.model_dump(by_alias=True, exclude_none=True)
        },
        "tool_choice": chosen.model_dump()
        if isinstance(chosen, NamedFunction)
        else chosen or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_p": 1.0 if request.top_p is None else request.top_p,
    }
    for name, value in found.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:  # a lone surrogate, or a number that JSON does not have
            problem = f"the answer cannot repeat {name} as JSON in UTF-8: correct {name}"
            raise ApiError(problem, param=name) from None
    return found
