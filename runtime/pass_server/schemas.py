"""The schemas of requests to /v1/completions and /v1/chat/completions, with fields of OpenAI, of
vLLM and our own. Types are strict, and unknown fields are errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, create_model

from pass_runtime import MAX_BIASES, MAX_LOGPROBS, REQUEST_FIELDS, RequestField
from pass_server.fields import (
    LIST,
    MAX_LIST_ITEMS,
    MAX_NAME_CHARS,
    MAX_TOKEN_IDS,
    OBJECT,
    TEXT,
    CacheControl,
    JsonSchema,
    MaxKeys,
    Messages,
    Name,
    NamedChoice,
    StrictObject,
    Text,
    Tools,
    null_or,
    text_or,
)

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
    """Return the tag of a prompt in the union `Prompt`, by the type of its first element."""
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
    include_obfuscation: Any = null_or(False)


KIND_TYPES: dict[str, Any] = {
    "number": float,
    "whole": int,
    "flag": bool,
    "text": str,
    "stops": Stop,
    "ids": TokenIds,
    "texts": list[NonEmptyName],
}
"""The type of a field's value, by `RequestField.kind`."""


def _http_field(field: RequestField) -> tuple[Any, Any]:
    """Return the type and the pydantic Field of a request field."""
    bounds: dict[str, Any] = dict(field.bounds if field.http_schema is None else field.http_schema)
    value_type: Any = Literal[field.choices] if field.choices else KIND_TYPES.get(field.kind)
    if field.kind == "biases":
        value_type = Annotated[
            dict[TokenIdKey, Annotated[float, Field(**bounds)]], MaxKeys(MAX_BIASES)
        ]
        bounds = {}
    return value_type | None, Field(None, **{"description": field.help} | bounds)


def common_fields_model(fields: Iterable[RequestField]) -> type[StrictObject]:
    """Return a schema with those of `fields` that HTTP requests have, each with null as default."""
    http_fields: dict[str, Any] = {
        field.http: _http_field(field) for field in fields if field.http is not None
    }
    return create_model("RequestFields", __base__=StrictObject, **http_fields)


class PromptCacheOptions(StrictObject):
    mode: Name | None = Field(None, description="Not used.")
    ttl: Name | None = Field(None, description="Not used.")
    comparison_response_id: Name | None = Field(None, description="Not used.")
    prewarm: Any = null_or(False)


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
    service_tier: Any = null_or("auto", "default")
    store: Any = null_or(False)


class CommonFields(NeutralFields, common_fields_model(REQUEST_FIELDS)):  # type: ignore[misc]
    """The fields that all endpoints have."""

    model: Name
    stream: bool | None = None
    speculative: bool | None = Field(
        None, description="false: plain decoding, as plan `ar`. The text is the same."
    )


class GenerationRequest(StructuredOutputFields, CommonFields):
    """The fields that completions and chats have."""

    n: int | None = Field(
        None, ge=1, le=128, description="Sequences to write; sequence i is sampled with seed + i."
    )
    max_tokens: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    pass_details: bool | None = Field(
        None, description="Return the tokens of each pass, each with its source."
    )

    length_penalty: Any = null_or(1)
    prompt_logprobs: Any = null_or()
    truncate_prompt_tokens: Any = null_or()
    use_beam_search: Any = null_or(False)
    early_stopping: Any = null_or(False)
    detokenize: Any = null_or(True)
    skip_special_tokens: Any = null_or(True)
    spaces_between_special_tokens: Any = null_or(True)
    include_stop_str_in_output: Any = null_or(False)
    priority: Any = null_or(0)
    logits_processors: Any = null_or([])
    return_token_ids: Any = null_or(False)
    return_tokens_as_token_ids: Any = null_or(False)


class CompletionRequest(GenerationRequest):
    """The body of a request to /v1/completions."""

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
    add_special_tokens: Any = null_or(True)


ToolChoiceName = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ToolChoiceName, TEXT] | Annotated[NamedChoice, OBJECT], text_or(OBJECT)
]


class ChatRequest(GenerationRequest):
    """The body of a request to /v1/chat/completions."""

    messages: Messages
    best_of: Any = null_or(1)
    echo: Any = null_or(False)
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
    functions: Any = null_or([])
    function_call: Any = null_or("none", "auto")
    modalities: Any = null_or(["text"])
    audio: Any = null_or()
    prediction: Any = null_or()
    reasoning_effort: Any = null_or("none")
    verbosity: Any = null_or("medium")
    web_search_options: Any = null_or()
    add_generation_prompt: Any = null_or(True)
    continue_final_message: Any = null_or(False)
    add_special_tokens: Any = null_or(False)
    chat_template: Any = null_or()
    documents: Any = null_or([])
