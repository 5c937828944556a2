"""The fields of a chat's messages and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pass_runtime.serve.fields import Fields, only

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class ContentPart(BaseModel):
    """{"type": "text", "text": ...}; other types are refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None


Content = str | list[ContentPart]


class CalledFunction(Fields):
    name: FunctionName
    arguments: str = Field(description="JSON.")


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
    reasoning_content: str | None = Field(None, description="For templates that read it.")
    tool_calls: list[ToolCall] | None = Field(None, max_length=1024)
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


class FunctionFields(Fields):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(None, description="Where calls are required, arguments always follow the schema.")


class Tool(Fields):
    type: Literal["function"]
    function: FunctionFields


class ChosenFunction(Fields):
    name: str


class NamedChoice(Fields):
    type: Literal["function"]
    function: ChosenFunction
