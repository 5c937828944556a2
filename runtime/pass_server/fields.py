"""What the schemas of requests are made of: base classes, unsupported fields, messages, tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pass_server.api_error import ApiError, not_supported, unknown_field

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
TEXT, LIST, OBJECT = Tag("[str]"), Tag("[list]"), Tag("[dict]")


def text_or(tag: Tag) -> Discriminator:
    """Return the discriminator of a union of TEXT and LIST, or of TEXT and OBJECT. Without it,
    pydantic would report a wrong element of the list as a list that should be a text."""
    others = list if tag is LIST else (dict, BaseModel)
    return Discriminator(lambda value: (tag if isinstance(value, others) else TEXT).tag)


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
    """A JSON object with at most MAX_FIELDS fields, which are counted before any is validated. An
    unknown field that is null counts as absent: clients write out fields that they do not set."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        MaxKeys(MAX_FIELDS).check(value)
        if not isinstance(value, dict) or None not in value.values():
            return value
        known = {info.alias or name for name, info in cls.model_fields.items()}
        return {key: each for key, each in value.items() if each is not None or key in known}


class StrictObject(BoundedObject):
    """An object that may have only the fields that its class lists."""

    model_config = ConfigDict(extra="forbid")


def null_or(*neutral: Any) -> Any:
    """Return a field for what the server does not support: it may only be null or one of `neutral`,
    the values that change nothing. Validation accepts all values; see `check_supported`."""
    return Field(None, json_schema_extra={"enum": [None, *neutral]})


def check_supported(
    fields: BaseModel, path: str = "", reasons: Mapping[str, str] | None = None
) -> None:
    """Raise ApiError if a field, or one of the objects in it, has a value that its `null_or` does
    not allow. path: what precedes the names of fields in the error. reasons: why, by path."""
    for name, info in type(fields).model_fields.items():
        extra, value, where = info.json_schema_extra, getattr(fields, name), path + name
        if isinstance(extra, dict):
            allowed = [(each, isinstance(each, bool)) for each in cast(list[Any], extra["enum"])]
            if (value, isinstance(value, bool)) not in allowed:  # 0 == False, but is another value
                raise not_supported(where, value, (reasons or {}).get(where, ""))
        elif isinstance(value, StrictObject):
            check_supported(value, f"{where}.", reasons)
        elif isinstance(value, list) and value and isinstance(value[0], StrictObject):
            for i, each in enumerate(value):
                check_supported(each, f"{where}.{i}.", reasons)


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


JsonSchema = Annotated[dict[Name, Any], MaxKeys(4096)]
CacheControl = Annotated[JsonSchema | None, Field(exclude=True, description="Not used.")]
"""How long a prompt should stay cached. Clients write it into texts, messages and tools; it is not
dumped, so that the model never sees it."""


class ContentPart(BoundedObject):
    """{"type": "text", "text": ...}. Other parts are read too, so that `texts_of` can refuse them
    with an error that says what is supported."""

    model_config = ConfigDict(extra="allow")
    type: Name
    text: Text | None = None
    cache_control: CacheControl = None
    prompt_cache_breakpoint: CacheControl = None


Parts = Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)]
Content = Annotated[Annotated[Text, TEXT] | Annotated[Parts, LIST], text_or(LIST)]


def texts_of(
    content: str | list[ContentPart] | None,
    path: str,
    types: Sequence[str] = ("text",),
    unused: Sequence[str] = (),
) -> list[str]:
    """Return the texts of a content. Raises ApiError if a part has another type than `types`, or a
    field that is none of `unused`. path: that of the content, for errors."""
    if not isinstance(content, list):
        return [content or ""]
    for i, part in enumerate(content):
        if part.type not in types or part.text is None:
            raise ApiError(
                f'{path} must be text, in parts such as {{"type": "{types[0]}", "text": ...}}: '
                "this model reads text only",
                param=path,
                code="unsupported_content_part",
            )
        if unknown := [name for name in part.model_extra or () if name not in unused]:
            raise unknown_field(f"{path}.{i}.{unknown[0]}")
    return [part.text or "" for part in content]


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
    cache_control: CacheControl = None


class AssistantMessage(StrictObject):
    """A message of the model."""

    role: Literal["assistant"]
    content: Content | None = Field(None, description="Absent or null beside thoughts or calls.")
    reasoning_content: Text | None = Field(None, description="For templates that read it.")
    tool_calls: list[ToolCall] | None = Field(None, max_length=1024, fail_fast=True)
    name: Any = null_or()
    refusal: Any = null_or()
    audio: Any = null_or()
    function_call: Any = null_or()
    annotations: Any = null_or([])
    cache_control: CacheControl = None


class ToolMessage(StrictObject):
    """What a function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str = Field(max_length=256, description="The id of a call in an earlier message.")
    name: Name | None = Field(None, description="The name of the function; it may be left out.")
    cache_control: CacheControl = None


ChatMessage = Annotated[UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class FunctionFields(StrictObject):
    name: FunctionName
    description: Text | None = None
    parameters: JsonSchema | None = Field(None, description="A JSON schema.")
    strict: bool | None = Field(
        None, description="Not used: arguments of required calls always follow the schema."
    )
    cache_control: CacheControl = None


class Tool(StrictObject):
    type: Literal["function"]
    function: FunctionFields
    cache_control: CacheControl = None


Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]


class ChosenFunction(StrictObject):
    name: Name


class NamedChoice(StrictObject):
    type: Literal["function"]
    function: ChosenFunction
