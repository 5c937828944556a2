"""The items that the input of /v1/responses may hold, which are also those of an earlier answer's output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from pass_server.chat_schemas import Content, FunctionName, Parts
from pass_server.fields import Fields, Name, Text, only


class Item(Fields):
    id: Name | None = Field(None, description="Not used.")
    status: Name | None = Field(None, description="Not used.")


class MessageItem(Item):
    """A message of anybody; `type` may be left out."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer is taken as system.")
    content: Content
    phase: Any = only()


class ReasoningItem(Item):
    """What the model thought before the message or the calls that follow, for templates that read it."""

    type: Literal["reasoning"]
    content: Parts | None = None
    summary: Any = only([])
    encrypted_content: Any = only()


class CallItem(Item):
    """A call of a function, by the model."""

    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: FunctionName
    arguments: Text = Field(description="JSON.")
    namespace: Any = only()
    caller: Any = only()


class ResultItem(Item):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256, description="The call, in an item before.")
    output: Content
    caller: Any = only()


def _kind(item: Any) -> Any:
    """The type of an item that is not validated, or is."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="this server reads items of the types message, function_call, function_call_output and "
        "reasoning",
    ),
]
