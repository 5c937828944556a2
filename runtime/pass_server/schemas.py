"""The schemas of requests to /v1/completions and /v1/chat/completions, with fields of OpenAI, of
vLLM and our own. Types are strict, and unknown fields are errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    Tag,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from pass_runtime import MAX_BAD_WORDS, MAX_BIASES, MAX_LOGPROBS, REQUEST_OPTIONS, Option
from pass_server.api_error import UNSUPPORTED, ApiError, unknown_field

MAX_TEXT_CHARS = 1 << 24
"""The most characters of a text: more than a body has with the default max_body_bytes."""
MAX_NAME_CHARS = 1024
MAX_FIELDS = 256
MAX_LIST_ITEMS = 1 << 16
"""The most elements of a list without a limit of its own."""
MAX_TOKEN_IDS = 1 << 24

Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
TEXT, LIST, OBJECT = Tag("[str]"), Tag("[list]"), Tag("[dict]")


def text_or(tag: Tag) -> Discriminator:
    """Return the discriminator of a union of TEXT and `tag`. Without it, pydantic would report a
    wrong element of a list as a list that should be a text."""
    others = list if tag is LIST else (dict, BaseModel)
    return Discriminator(lambda value: (tag if isinstance(value, others) else TEXT).tag)


@dataclass(frozen=True)
class MaxKeys:
    """Annotates a dict that may have at most `limit` keys, which are counted before pydantic
    collects an error for each."""

    limit: int

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        bounded = cast(CoreSchema, {**handler(source), "max_length": self.limit})  # for OpenAPI
        return core_schema.no_info_before_validator_function(self.check, bounded)

    def check(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > self.limit:
            message = "an object may have at most {limit} keys here"
            raise PydanticCustomError("too_long", message, {"limit": self.limit})
        return value


class BoundedObject(BaseModel):
    """A JSON object with at most MAX_FIELDS fields. Unknown ones that are null count as absent.

    neutral: by the name of a field that is not supported, the values that change nothing, which are
    dropped. reasons: why others are refused."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}
    known: ClassVar[Collection[str]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        tables = [vars(base).get("neutral", {}) for base in reversed(cls.__mro__)]
        cls.neutral = {name: values for table in tables for name, values in table.items()}
        cls.known = {info.alias or name for name, info in cls.model_fields.items()}

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        MaxKeys(MAX_FIELDS).check(value)
        if not isinstance(value, dict):
            return value
        kept = {}
        for key, each in value.items():
            if key in cls.neutral and each is not None:
                # 0 == False, but is another value
                equal = [other for other in cls.neutral[key] if other == each]
                if not any(isinstance(other, bool) == isinstance(each, bool) for other in equal):
                    context = {"field": key, "value": each, "why": cls.reasons.get(key, "")}
                    raise PydanticCustomError(UNSUPPORTED, "not supported", context)
            elif each is not None or key in cls.known:
                kept[key] = each
        return kept


class StrictObject(BoundedObject):
    """An object that may have only the fields that its class lists."""

    model_config = ConfigDict(extra="forbid")


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


JsonSchema = Annotated[dict[Name, Any], MaxKeys(4096)]
CacheControl = Annotated[JsonSchema | None, Field(exclude=True, description="Not used.")]
"""How long a prompt should stay cached. It is not dumped, so that the model never sees it."""


class ContentPart(BoundedObject):
    """{"type": "text", "text": ...}. `texts_of` refuses other parts."""

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
    """Return the texts of a content at `path`. Raises ApiError if a part has another type than
    `types`, or an unknown field that is none of `unused`."""
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
    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = Field(None, description="Not used.")


class UserMessage(StrictObject):
    role: Literal["system", "developer", "user"] = Field(
        description="developer is taken as system."
    )
    content: Content
    neutral: ClassVar = {"name": ()}
    cache_control: CacheControl = None


class AssistantMessage(StrictObject):
    role: Literal["assistant"]
    content: Content | None = Field(None, description="Absent or null beside thoughts or calls.")
    reasoning_content: Text | None = Field(None, description="For templates that read it.")
    tool_calls: list[ToolCall] | None = Field(None, max_length=1024, fail_fast=True)
    neutral: ClassVar = {
        **dict.fromkeys(("name", "refusal", "audio", "function_call"), ()),
        "annotations": ([],),
    }
    cache_control: CacheControl = None


class ToolMessage(StrictObject):
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


DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default of `temperature`. In Python and in other commands the default is 0."""
ChoiceTexts = Annotated[list[Text], Field(max_length=MAX_LIST_ITEMS, fail_fast=True)]


class NamedSchema(StrictObject):
    """`json_schema` of a response format. The schema is enforced, whatever `strict` is."""

    name: Name | None = Field(None, description="Not used.")
    description: Text | None = Field(None, description="Not used.")
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictObject):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


SchemaOrText = Annotated[Annotated[JsonSchema, OBJECT] | Annotated[Text, TEXT], text_or(OBJECT)]


class StructuredOutputs(StrictObject):
    """vLLM's `structured_outputs`. Exactly one field must be set."""

    json_schema: SchemaOrText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: ChoiceTexts | None = None
    grammar: Text | None = Field(None, description="llguidance's variant of Lark.")


class StructuredOutputFields(StrictObject):
    """The fields that constrain the text of a request; at most one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = Field(None, description="As structured_outputs.json.")
    guided_regex: Text | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: ChoiceTexts | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: Text | None = Field(None, description="As structured_outputs.grammar.")


TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
MAX_PROMPTS = 4096
"""The most prompts of a request; ServeOptions.max_sequences may allow fewer."""
Stops = Annotated[list[Text], Field(max_length=16, fail_fast=True)]
Stop = Annotated[Annotated[Text, TEXT] | Annotated[Stops, LIST], text_or(LIST)]
TokenIdKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
NonEmptyName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Metadata = Annotated[dict[Name, Name], MaxKeys(64)]
TemplateVariables = Annotated[dict[Name, Text | int | float | bool | None], MaxKeys(64)]


def _prompt_tag(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "str"
    if prompt and isinstance(prompt[0], str):
        return "list[str]"
    return "list[list[int]]" if prompt and isinstance(prompt[0], list) else "list[int]"


_PROMPTS = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)
_TOKENS = Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)
Prompt = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[list[int], _TOKENS, Tag("list[int]")]
    | Annotated[list[Text], _PROMPTS, Tag("list[str]")]
    | Annotated[list[TokenIds], _PROMPTS, Tag("list[list[int]]")],
    Discriminator(_prompt_tag),
]


class StreamOptions(StrictObject):
    include_usage: bool | None = None
    neutral: ClassVar = {"include_obfuscation": (False,)}


HTTP_BOUNDS: dict[str, dict[str, Any]] = {
    "temperature": {"le": 2, "description": "0 takes the most likely token. Default 1."},
    "seed": {"ge": -(1 << 63), "description": "Negative seeds are taken modulo 2^64."},
    "plan": {"max_length": 100},
    "lookahead": {"ge": 0},
    "stop_token_ids": {"max_length": 64},
    "cache_salt": {"min_length": 1, "max_length": 256},
    "bad_words": {"max_length": MAX_BAD_WORDS, "fail_fast": True},
    "allowed_token_ids": {"min_length": 1},
}
"""What the HTTP API has in addition to the bounds of options, or in place of them."""
LISTS: dict[str, Any] = {"stop": Stop, "bad_words": list[NonEmptyName]}
"""The types of lists that are not of token ids."""


def _http_field(option: Option) -> tuple[Any, Any]:
    bounds: dict[str, Any] = {"description": option.help}
    value_type = Literal[option.choices] if option.choices else option.type
    if option.shape == "map":
        biases = dict[TokenIdKey, Annotated[float, Field(**option.bounds)]]
        value_type = Annotated[biases, MaxKeys(MAX_BIASES)]
    elif option.shape == "list":
        value_type = LISTS.get(option.name, TokenIds)
    else:
        bounds |= option.bounds
    return value_type | None, Field(None, **bounds | HTTP_BOUNDS.get(option.name, {}))


_http_fields: dict[str, Any] = {
    each.http: _http_field(each) for each in REQUEST_OPTIONS.values() if each.http is not None
}
RequestFields: Any = create_model("RequestFields", __base__=StrictObject, **_http_fields)


class PromptCacheOptions(StrictObject):
    mode: Name | None = Field(None, description="Not used.")
    ttl: Name | None = Field(None, description="Not used.")
    comparison_response_id: Name | None = Field(None, description="Not used.")
    neutral: ClassVar = {"prewarm": (False,)}


class NeutralFields(StrictObject):
    """The fields of OpenAI's APIs, and of clients for them, that change no text."""

    user: Name | None = Field(None, description="Not used.")
    safety_identifier: Name | None = Field(None, description="Not used.")
    metadata: Metadata | None = Field(None, description="Not used.")
    client_metadata: JsonSchema | None = Field(None, description="Not used.")
    prompt_cache_key: Name | None = Field(None, description="Not used.")
    prompt_cache_retention: Name | None = Field(None, description="Not used.")
    prompt_cache_options: PromptCacheOptions | None = Field(None, description="Not used.")
    cache_control: CacheControl = None
    neutral: ClassVar = {
        "service_tier": ("auto", "default"),
        "store": (False,),
    }


class CommonFields(NeutralFields, RequestFields):  # type: ignore[misc]
    model: Name
    stream: bool | None = None
    speculative: bool | None = Field(
        None, description="false: plain decoding, as plan `ar`. The text is the same."
    )


class GenerationRequest(StructuredOutputFields, CommonFields):
    _path: Callable[[str], str] = PrivateAttr(default=str)

    n: int | None = Field(
        None, ge=1, le=128, description="Sequences to write; sequence i is sampled with seed + i."
    )
    max_tokens: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    pass_details: bool | None = Field(
        None, description="Return the tokens of each pass, each with its source."
    )

    neutral: ClassVar = {
        "length_penalty": (1,),
        "priority": (0,),
        "logits_processors": ([],),
        **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens"), ()),
        **dict.fromkeys(("detokenize", "skip_special_tokens"), (True,)),
        "spaces_between_special_tokens": (True,),
        **dict.fromkeys(("use_beam_search", "early_stopping", "return_token_ids"), (False,)),
        **dict.fromkeys(("include_stop_str_in_output", "return_tokens_as_token_ids"), (False,)),
    }

    def path(self, field: str) -> str:
        """Return the path of a field in the body that the client sent, for errors."""
        return self._path(field)


class CompletionRequest(GenerationRequest):
    prompt: Prompt = Field(description="Text or token ids, of one prompt or several.")
    max_tokens: int | None = Field(None, ge=0, description="0 needs echo. Default 16.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(
        None, ge=1, le=128, description="Generate this many, and return the n likeliest."
    )
    echo: bool | None = Field(None, description="Begin text and logprobs with the prompt.")
    suffix: Text | None = Field(
        None, description="Write what stands between the prompt and this, if the model can."
    )
    neutral: ClassVar = {"add_special_tokens": (True,)}


ToolChoiceName = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ToolChoiceName, TEXT] | Annotated[NamedChoice, OBJECT], text_or(OBJECT)
]


class ChatRequest(GenerationRequest):
    messages: Messages
    neutral: ClassVar = {
        "best_of": (1,),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "function_call": ("none", "auto"),
        "add_generation_prompt": (True,),
        **dict.fromkeys(("echo", "continue_final_message", "add_special_tokens"), (False,)),
        **dict.fromkeys(("functions", "documents"), ([],)),
        **dict.fromkeys(("audio", "prediction", "web_search_options", "chat_template"), ()),
    }
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="Default auto if there are tools. none: they are not shown to the model."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call, if calls are required."
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Variables that the model's chat template reads."
    )
