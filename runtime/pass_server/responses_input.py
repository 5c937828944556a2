"""Requests of /v1/responses, which become chat requests with the same prompt and options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from pass_server import schemas
from pass_server.answers import Json
from pass_server.api_error import ApiError, validation_error


class Item(schemas.StrictObject):
    id: schemas.Name | None = Field(None, description="Not used.")
    status: schemas.Name | None = Field(None, description="Not used.")
    cache_control: schemas.CacheControl = None


class MessageItem(Item):
    """A message of any role; `type` may be left out."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is taken as system."
    )
    content: schemas.Content
    neutral: ClassVar = {"phase": ()}


class ReasoningItem(Item):
    """The reasoning before the next message or calls, for chat templates that read it."""

    type: Literal["reasoning"]
    content: schemas.Parts | None = None
    neutral: ClassVar = {
        "summary": ([],),
        "encrypted_content": (),
    }


class CallItem(Item):
    """A call of a function, by the model."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: schemas.FunctionName
    arguments: schemas.Text = Field(description="As in a chat.")
    neutral: ClassVar = {
        "namespace": (),
        "caller": ({"type": "direct"},),
    }


class ResultItem(Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256, description="The id of a call in an earlier item.")
    output: schemas.Content
    neutral: ClassVar = {"caller": ({"type": "direct"},)}


def _item_type(item: Any) -> Any:
    """Return the tag of an item, a dict or one of the models above, in the union `InputItem`."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(
        _item_type,
        custom_error_type="item_type",
        custom_error_message="this server reads items of the types message, function_call, "
        "function_call_output and reasoning",
    ),
]


InputItems = Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True)]
Input = Annotated[
    Annotated[schemas.Text, schemas.TEXT] | Annotated[InputItems, schemas.LIST],
    schemas.text_or(schemas.LIST),
]


class FunctionTyped(schemas.StrictObject):
    type: Literal["function"]


class FunctionTool(schemas.FunctionFields, FunctionTyped):
    """A tool. The fields of the last base come first, so that errors name `type` first."""

    neutral: ClassVar = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
    }


class NamedFunction(FunctionTyped):
    name: schemas.Name


ToolChoice = Annotated[
    Annotated[schemas.ToolChoiceName, schemas.TEXT] | Annotated[NamedFunction, schemas.OBJECT],
    schemas.text_or(schemas.OBJECT),
]


class TextFormat(schemas.StrictObject):
    """`text.format`: what form the text has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: schemas.JsonSchema | None = Field(None, alias="schema")
    name: schemas.Name | None = Field(None, description="Not used.")
    description: schemas.Text | None = Field(None, description="Not used.")
    strict: bool | None = Field(
        None, description="The schema is enforced whether it is true or not."
    )


class TextOptions(schemas.StrictObject):
    format: TextFormat | None = None
    neutral: ClassVar = {"verbosity": ("medium",)}


class ReasoningOptions(schemas.StrictObject):
    reasons: ClassVar = {
        "effort": "set the option of the model's chat template, if it has one, with "
        "chat_template_kwargs"
    }
    neutral: ClassVar = {
        "effort": (),
        "summary": (),
        "generate_summary": (),
    }


class ResponseStreamOptions(schemas.StrictObject):
    neutral: ClassVar = {"include_obfuscation": (False,)}


class ResponsesRequest(schemas.CommonFields):
    """The body of a request to /v1/responses."""

    input: Input
    instructions: schemas.Text | None = Field(
        None, description="A system message before the input."
    )
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: schemas.Metadata | None = Field(None, description="Repeated in the answer.")
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: ToolChoice | None = Field(None, description="As in a chat.")
    parallel_tool_calls: bool | None = Field(None, description="As in a chat.")
    chat_template_kwargs: schemas.TemplateVariables | None = Field(
        None, description="As in a chat."
    )
    stream_options: ResponseStreamOptions | None = None
    reasoning: ReasoningOptions | None = None

    reasons: ClassVar = {
        "store": "it stores no responses",
        "previous_response_id": "it stores no responses, so send the items of the conversation so "
        "far as input",
        "conversation": "it stores no conversations, so send the items so far as input",
        "background": "it stores no responses that could be asked for later",
        "prompt": "it stores no prompts",
        "include": "there is nothing more that an answer could include",
    }
    neutral: ClassVar = {
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "include": ([],),
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }


Message = dict[str, Any]
_ITEM_FIELDS = {"tool_call_id": "call_id", "function.arguments": "arguments", "content": "content"}
"""Maps a field of a chat's message or call to the field of the item that it was made of."""


_REQUEST_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Maps fields of a chat to fields of /v1/responses with other names."""


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
        if param in _REQUEST_FIELDS:
            return _REQUEST_FIELDS[param]
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


def _chat_content(content: schemas.Content, path: str) -> Any:
    """Return the content for a chat message. path: of the item's field, for errors."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": text} for text in _texts(content, path)]


def _texts(content: schemas.Content, path: str) -> list[str]:
    types = ("input_text", "output_text", "reasoning_text")
    return schemas.texts_of(content, path, types, unused=("annotations", "logprobs"))


class ChatConversion:
    """A request of /v1/responses that was converted. chat: the chat request. echo: the fields of
    the request that the answer repeats. Making it raises ApiError if the request is invalid."""

    def __init__(self, request: ResponsesRequest) -> None:
        _check(request)
        self.echo = _echo(request)
        builder = MessagesBuilder(request.instructions)
        builder.add(request.input)
        try:
            self.chat = schemas.ChatRequest.model_validate(
                _fields(request) | {"messages": builder.messages}
            )
        except ValidationError as error:
            raise validation_error(error, builder.request_path) from None
        self.chat._path = builder.request_path


def _check(request: ResponsesRequest) -> None:
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
    fields = {name: getattr(request, name) for name in (*schemas.CommonFields.model_fields, *same)}
    fields["max_completion_tokens"] = request.max_output_tokens
    if isinstance(request.tool_choice, NamedFunction):
        fields["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.name}}
    if request.tools is not None:
        names = set(schemas.FunctionFields.model_fields)
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
        "temperature": schemas.DEFAULT_TEMPERATURE
        if request.temperature is None
        else request.temperature,
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
