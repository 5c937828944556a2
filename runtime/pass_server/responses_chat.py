"""Converts a request of /v1/responses to a chat request with the same prompt and options, and
errors about the chat back to errors about the request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from pass_server.api_error import ApiError, validation_error
from pass_server.choices import Json
from pass_server.fields import Content, FunctionFields, check_supported, texts_of
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
"""Maps a field of a chat's message or call to the field of the item that it was made of."""


class MessagesBuilder:
    """Builds chat messages from input items. Consecutive reasoning, text and calls of the model
    become one message, as chat templates expect.

    messages: the messages so far. item_paths: maps the path of a message or call in the chat, such
    as `messages.2`, to the path of the first item that it was made of, such as `input.3`.
    """

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[Message] = []
        self.item_paths: dict[str, str] = {}
        if instructions:
            self._begin({"role": "system", "content": instructions}, "instructions")

    def add(self, items: str | Sequence[InputItem]) -> None:
        """Add the messages of all items. Raises ApiError if an item is invalid."""
        if isinstance(items, str):
            self._begin({"role": "user", "content": items}, "input")
            return
        for i, item in enumerate(items):
            self._add(item, f"input.{i}")

    def request_path(self, param: str) -> str:
        """Return the path in the request for the path `param` in the chat."""
        if param == "messages":
            return "input"
        parts = param.split(".")
        for length in (4, 2):  # first the path of a call, messages.2.tool_calls.0, then messages.2
            if (path := self.item_paths.get(".".join(parts[:length]))) is not None:
                name = _ITEM_FIELDS.get(".".join(parts[length:]))
                return f"{path}.{name}" if name and path.startswith("input.") else path
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
            reasoning = _texts(item.content or [], f"{path}.content")
            message = self._assistant_message(path, "reasoning_content", "content", "tool_calls")
            message["reasoning_content"] = "\n".join(reasoning)
        else:
            self._add_message(item, path)

    def _add_message(self, item: MessageItem, path: str) -> None:
        content = _chat_content(item.content, f"{path}.content")
        if item.role == "assistant":
            self._assistant_message(path, "content", "tool_calls")["content"] = content
        else:
            self._begin({"role": item.role, "content": content}, path)

    def _assistant_message(self, path: str, *filled: str) -> Message:
        """Return the last message, if the model's and without fields `filled`, or a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(name in last for name in filled):
            self._begin({"role": "assistant"}, path)
        return self.messages[-1]

    def _begin(self, message: Message, path: str) -> None:
        self.item_paths[f"messages.{len(self.messages)}"] = path
        self.messages.append(message)


def _chat_content(content: Content, path: str) -> Any:
    """Return the content for a chat message. path: of the item's field, for errors."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": text} for text in _texts(content, path)]


def _texts(content: Content, path: str) -> list[str]:
    types = ("input_text", "output_text", "reasoning_text")
    return texts_of(content, path, types, unused=("annotations", "logprobs"))


_REQUEST_FIELDS = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""Maps fields of a chat, except `messages`, to fields of /v1/responses with other names."""


class ChatConversion:
    """A request of /v1/responses that was converted. chat: the chat request. echo: the fields of
    the request that the answer repeats. Making it raises ApiError if the request is invalid."""

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
        """Return an error about the chat with the request's names of the fields."""
        message, param = error.message, error.param
        if param is not None:
            param = _REQUEST_FIELDS.get(param) or self._builder.request_path(param)
            message = message.replace(error.param or "", param)
        for name, own_name in _REQUEST_FIELDS.items():
            message = message.replace(name, own_name)
        return ApiError(message, error.status, param=param, code=error.code, headers=error.headers)


def _check(request: ResponsesRequest) -> None:
    check_supported(request, reasons=REFUSAL_REASONS)
    if request.stream_options is not None and not request.stream:
        raise ApiError("stream_options are for streams: set stream to true", param="stream_options")
    form = _text_format(request)
    if form is not None and (form.type == "json_schema") != (form.json_schema is not None):
        problem = "give text.format a schema if its type is json_schema, and none otherwise"
        raise ApiError(problem, param="text.format")


def _text_format(request: ResponsesRequest) -> TextFormat | None:
    return None if request.text is None else request.text.format


def _fields(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of the chat, except messages."""
    same = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
    fields = {name: getattr(request, name) for name in (*CommonFields.model_fields, *same)}
    fields["max_completion_tokens"] = request.max_output_tokens
    if isinstance(request.tool_choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    if request.tools is not None:
        names = set(FunctionFields.model_fields)
        functions = [tool.model_dump(include=names, exclude_none=True) for tool in request.tools]
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
    if (form := _text_format(request)) is not None:
        fields["response_format"] = {"type": form.type}
        if form.json_schema is not None:
            fields["response_format"]["json_schema"] = {"schema": form.json_schema}
    return fields


def _echo(request: ResponsesRequest) -> Json:
    """Return the fields that the answer repeats. Raises ApiError if one cannot be sent as JSON."""
    form, choice = _text_format(request), request.tool_choice
    fields: Json = {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": DEFAULT_TEMPERATURE if request.temperature is None else request.temperature,
        "text": {
            "format": {"type": "text"}
            if form is None
            else form.model_dump(by_alias=True, exclude_none=True)
        },
        "tool_choice": choice.model_dump()
        if isinstance(choice, NamedFunction)
        else choice or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
        "top_p": 1.0 if request.top_p is None else request.top_p,
    }
    for name, value in fields.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except ValueError:  # a lone surrogate, or a number that JSON does not have
            problem = f"the answer cannot repeat {name} as JSON in UTF-8: correct {name}"
            raise ApiError(problem, param=name) from None
    return fields
