"""What the schemas of requests are made of: base classes, unsupported fields, messages, tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_TEXT_CHARS = 1 << 24
"""The most characters of a text: more than a body has with the default max_body_bytes."""
MAX_NAME_CHARS = 1024
"""The most characters of a name or an id."""
MAX_FIELDS = 256
"""The most fields of an object, including unknown ones."""
MAX_LIST_ITEMS = 1 << 16
"""The most elements of a list without a limit of its own."""
MAX_TOKEN_IDS = 1 << 24
"""The most token ids in a list."""

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]


@dataclass(frozen=True)
class MaxKeys:
    """Annotates a dict that may have at most `limit` keys. They are counted before they are
    validated, since pydantic would collect an error for each invalid key."""

    limit: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        bounded = cast(CoreSchema, {**handler(source), "max_length": self.limit})  # for OpenAPI
        return core_schema.no_info_before_validator_function(self.check, bounded)

    def check(self, value: Any) -> Any:
        """Return the value. Raises PydanticCustomError if it is a dict with more keys."""
        if isinstance(value, dict) and len(value) > self.limit:
            message = "an object may have at most {limit} keys here"
            raise PydanticCustomError("too_long", message, {"limit": self.limit})
        return value


class BoundedObject(BaseModel):
    """A JSON object with at most MAX_FIELDS fields, which are counted before any is validated."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        return MaxKeys(MAX_FIELDS).check(value)


class StrictObject(BoundedObject):
    """An object that may have only the fields that its class lists."""

    model_config = ConfigDict(extra="forbid")


def null_or(*neutral: Any) -> Any:
    """Return a field for what the server does not support: it may only be null or one of `neutral`,
    the values that change nothing. Validation accepts all values; see `unsupported_field`."""
    return Field(None, json_schema_extra={"enum": [None, *neutral]})


def unsupported_field(fields: BaseModel) -> str | None:
    """Return the name of the first field with a value that its `null_or` does not allow, if any."""
    for name, info in type(fields).model_fields.items():
        extra, value = info.json_schema_extra, getattr(fields, name)
        if isinstance(extra, dict):
            allowed = [(each, isinstance(each, bool)) for each in cast(list[Any], extra["enum"])]
            if (value, isinstance(value, bool)) not in allowed:  # 0 == False, but is another value
                return name
    return None


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class ContentPart(BoundedObject):
    """{"type": "text", "text": ...}. Parts of other types are read too, so that `turns.py` and
    `responses_chat.py` can refuse them with an error that says what is supported."""

    model_config = ConfigDict(extra="allow")
    type: Name
    text: Text | None = None


Parts = Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)]
Content = Text | Parts
JsonSchema = Annotated[dict[Name, Any], MaxKeys(4096)]


class CalledFunction(StrictObject):
    name: FunctionName
    arguments: Text = Field(description="JSON; other text is shown to the model as it is.")


class ToolCall(StrictObject):
    """A call of a function, in an assistant's message."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = Field(None, description="Not used.")


class UserMessage(StrictObject):
    """A message of the user, the system or the developer."""

    role: Literal["system", "developer", "user"] = Field(
        description="developer is taken as system."
    )
    content: Content
    name: Any = null_or()


class AssistantMessage(StrictObject):
    """A message of the model."""

    role: Literal["assistant"]
    content: Content | None = Field(None, description="null if there are tool_calls only.")
    reasoning_content: Text | None = Field(None, description="For templates that read it.")
    tool_calls: list[ToolCall] | None = Field(None, max_length=1024, fail_fast=True)
    name: Any = null_or()
    refusal: Any = null_or()
    audio: Any = null_or()
    function_call: Any = null_or()
    annotations: Any = null_or([])


class ToolMessage(StrictObject):
    """What a function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=256, description="The id of a call in an earlier message.")
    name: Name | None = Field(None, description="The name of the function; it may be left out.")


ChatMessage = Annotated[UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class FunctionFields(StrictObject):
    name: FunctionName
    description: Text | None = None
    parameters: JsonSchema | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(
        None, description="Not used: arguments of required calls always follow the schema."
    )


class Tool(StrictObject):
    type: Literal["function"]
    function: FunctionFields


Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class ChosenFunction(StrictObject):
    name: Name


class NamedChoice(StrictObject):
    type: Literal["function"]
    function: ChosenFunction
