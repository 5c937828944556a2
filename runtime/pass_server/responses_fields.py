"""The fields of /v1/responses. Its input may contain the output items of earlier answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pass_server.fields import (
    Content,
    FunctionFields,
    FunctionName,
    JsonSchema,
    Name,
    Parts,
    StrictObject,
    Text,
    only,
)
from pass_server.schemas import CommonFields, Metadata, TemplateVariables


class Item(StrictObject):
    id: Name | None = Field(None, description="Not used.")
    status: Name | None = Field(None, description="Not used.")


class MessageItem(Item):
    """A message of any role; `type` may be left out."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="developer is taken as system."
    )
    content: Content
    phase: Any = only()


class ReasoningItem(Item):
    """The reasoning before the next message or calls, for chat templates that read it."""

    type: Literal["reasoning"]
    content: Parts | None = None
    summary: Any = only([])
    encrypted_content: Any = only()


class CallItem(Item):
    """A call of a function, by the model."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: FunctionName
    arguments: Text = Field(description="As in a chat.")
    namespace: Any = only()
    caller: Any = only()


class ResultItem(Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256, description="The id of a call in an earlier item.")
    output: Content
    caller: Any = only()


def _item_type(item: Any) -> Any:
    """The type of an item, which is a dict or one of these models."""
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
Input = (
    Annotated[  # without a discriminator, an invalid item would be reported as "should be a string"
        Annotated[Text, Tag("str")] | Annotated[InputItems, Tag("list[item]")],
        Discriminator(lambda value: "str" if isinstance(value, str) else "list[item]"),
    ]
)


class FunctionTyped(StrictObject):
    type: Literal["function"]


class FunctionTool(FunctionFields, FunctionTyped):
    """A tool. By the order of bases, `type` is validated first, so that errors name it first."""


class NamedFunction(FunctionTyped):
    name: Name


class TextFormat(StrictObject):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, alias="schema")
    name: Name | None = Field(None, description="Not used.")
    description: Text | None = Field(None, description="Not used.")
    strict: bool | None = Field(
        None, description="The schema is enforced whether it is true or not."
    )


class TextOptions(StrictObject):
    format: TextFormat | None = None
    verbosity: Any = only("medium")


class ReasoningOptions(StrictObject):
    effort: Any = only()
    summary: Any = only()
    generate_summary: Any = only()


class ResponseStreamOptions(StrictObject):
    include_obfuscation: Any = only(False)


class ResponsesRequest(CommonFields):
    """/v1/responses"""

    input: Input
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: Metadata | None = Field(None, description="Repeated in the answer.")
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=128, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = Field(
        None, description="As in a chat."
    )
    parallel_tool_calls: bool | None = Field(None, description="As in a chat.")
    chat_template_kwargs: TemplateVariables | None = Field(None, description="As in a chat.")
    stream_options: ResponseStreamOptions | None = None
    reasoning: ReasoningOptions | None = None

    store: Any = only(False)
    previous_response_id: Any = only()
    conversation: Any = only()
    background: Any = only(False)
    prompt: Any = only()
    include: Any = only([])
    max_tool_calls: Any = only()
    top_logprobs: Any = only(0)
    truncation: Any = only("disabled")
    service_tier: Any = only("auto", "default")


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
"""Why a value is refused, by field."""
