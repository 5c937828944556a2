"""The fields of a chat's messages and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from pass_server.fields import Fields, MaxKeys, Name, Object, Text, only

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class ContentPart(Object):
    """{"type": "text", "text": ...}; other types are refused by name."""

    model_config = ConfigDict(extra="allow")
    type: Name
    text: Text | None = None


Parts = Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)]
Content = Text | Parts
JsonSchema = Annotated[dict[Name, Any], MaxKeys(4096)]


class CalledFunction(Fields):
    name: FunctionName
    arguments: Text = Field(description="JSON.")


class ToolCall(Fields):
    """A call in an assistant's message."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = Field(None, description="Not used.")


class UserMessage(Fields):
    """From whoever asks."""

    role: Literal["system", "developer", "user"] = Field(description="developer is taken as system.")
    content: Content
    name: Any = only()


class AssistantMessage(Fields):
    """A turn of the model."""

    role: Literal["assistant"]
    content: Content | None = Field(None, description="null where there are tool_calls only.")
    reasoning_content: Text | None = Field(None, description="For templates that read it.")
    tool_calls: list[ToolCall] | None = Field(None, max_length=1024, fail_fast=True)
    name: Any = only()
    refusal: Any = only()
    audio: Any = only()
    function_call: Any = only()
    annotations: Any = only([])


class ToolMessage(Fields):
    """What a function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=256, description="The call, in a message before.")


ChatMessage = Annotated[UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class FunctionFields(Fields):
    name: FunctionName
    description: Text | None = None
    parameters: JsonSchema | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(None, description="Where calls are required, arguments always follow the schema.")


class Tool(Fields):
    type: Literal["function"]
    function: FunctionFields


Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class ChosenFunction(Fields):
    name: Name


class NamedChoice(Fields):
    type: Literal["function"]
    function: ChosenFunction
