"""The schema of requests to /v1/responses, whose input may contain items of earlier answers.

A field that is `null_or(...)` is not supported: only null and the given values are accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pass_server.fields import (
    LIST,
    OBJECT,
    TEXT,
    CacheControl,
    Content,
    FunctionFields,
    FunctionName,
    JsonSchema,
    Name,
    Parts,
    StrictObject,
    Text,
    null_or,
    text_or,
)
from pass_server.schemas import CommonFields, Metadata, TemplateVariables, ToolChoiceName


class Item(StrictObject):
    id: Name | None = Field(None, description="Not used.")
    status: Name | None = Field(None, description="Not used.")
    cache_control: CacheControl = None


class MessageItem(Item):
    """A message of any role; `type` may be left out."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is taken as system."
    )
    content: Content
    phase: Any = null_or()


class ReasoningItem(Item):
    """The reasoning before the next message or calls, for chat templates that read it."""

    type: Literal["reasoning"]
    content: Parts | None = None
    summary: Any = null_or([])
    encrypted_content: Any = null_or()


class CallItem(Item):
    """A call of a function, by the model."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: FunctionName
    arguments: Text = Field(description="As in a chat.")
    namespace: Any = null_or()
    caller: Any = null_or({"type": "direct"})


class ResultItem(Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256, description="The id of a call in an earlier item.")
    output: Content
    caller: Any = null_or({"type": "direct"})


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
Input = Annotated[Annotated[Text, TEXT] | Annotated[InputItems, LIST], text_or(LIST)]


class FunctionTyped(StrictObject):
    type: Literal["function"]


class FunctionTool(FunctionFields, FunctionTyped):
    """A tool. The fields of the last base come first, so that errors name `type` first."""

    allowed_callers: Any = null_or(["direct"])
    defer_loading: Any = null_or(False)


class NamedFunction(FunctionTyped):
    name: Name


ToolChoice = Annotated[
    Annotated[ToolChoiceName, TEXT] | Annotated[NamedFunction, OBJECT], text_or(OBJECT)
]


class TextFormat(StrictObject):
    """`text.format`: what form the text has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, alias="schema")
    name: Name | None = Field(None, description="Not used.")
    description: Text | None = Field(None, description="Not used.")
    strict: bool | None = Field(
        None, description="The schema is enforced whether it is true or not."
    )


class TextOptions(StrictObject):
    format: TextFormat | None = None
    verbosity: Any = null_or("medium")


class ReasoningOptions(StrictObject):
    effort: Any = null_or()
    summary: Any = null_or()
    generate_summary: Any = null_or()


class ResponseStreamOptions(StrictObject):
    include_obfuscation: Any = null_or(False)


class ResponsesRequest(CommonFields):
    """The body of a request to /v1/responses."""

    input: Input
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: Metadata | None = Field(None, description="Repeated in the answer.")
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: ToolChoice | None = Field(None, description="As in a chat.")
    parallel_tool_calls: bool | None = Field(None, description="As in a chat.")
    chat_template_kwargs: TemplateVariables | None = Field(None, description="As in a chat.")
    stream_options: ResponseStreamOptions | None = None
    reasoning: ReasoningOptions | None = None

    previous_response_id: Any = null_or()
    conversation: Any = null_or()
    background: Any = null_or(False)
    prompt: Any = null_or()
    include: Any = null_or([])
    max_tool_calls: Any = null_or()
    top_logprobs: Any = null_or(0)
    truncation: Any = null_or("disabled")


REFUSAL_REASONS = {
    "store": "it stores no responses",
    "previous_response_id": (
        "it stores no responses, so send the items of the conversation so far as input"
    ),
    "conversation": "it stores no conversations, so send the items so far as input",
    "background": "it stores no responses that could be asked for later",
    "prompt": "it stores no prompts",
    "include": "there is nothing more that an answer could include",
    "reasoning.effort": (
        "set the option of the model's chat template, if it has one, with chat_template_kwargs"
    ),
}
"""The reasons for which values of unsupported fields are refused, by field."""
