"""The fields of requests, OpenAI's, vLLM's and our own: strictly typed, no others allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, create_model

from pass_runtime import (
    MAX_BIASES,
    MAX_LOGPROBS,
    REQUEST_FIELDS,
    RequestField,
)
from pass_server.fields import (
    MAX_LIST_ITEMS,
    MAX_NAME_CHARS,
    MAX_TOKEN_IDS,
    JsonSchema,
    MaxKeys,
    Messages,
    Name,
    NamedChoice,
    StrictObject,
    Text,
    Tools,
    only,
)

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default of `temperature`; that of the library and of other commands is 0."""
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


class StructuredOutputs(StrictObject):
    """vLLM's field of this name. Exactly one of these must be set."""

    json_schema: JsonSchema | Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: ChoiceTexts | None = None
    grammar: Text | None = Field(None, description="llguidance's variant of Lark.")


class StructuredOutputFields(StrictObject):
    """The fields that constrain the text of a request; at most one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | Text | None = Field(None, description="As structured_outputs.json.")
    guided_regex: Text | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: ChoiceTexts | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: Text | None = Field(None, description="As structured_outputs.grammar.")


TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
MAX_PROMPTS = 4096
"""The most prompts of a request; ServeOptions.max_sequences may allow fewer."""
Stop = Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)]
TokenIdKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
NonEmptyName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Metadata = Annotated[dict[Name, Name], MaxKeys(64)]
TemplateVariables = Annotated[dict[Name, Text | int | float | bool | None], MaxKeys(64)]


def _prompt_tag(prompt: Any) -> str:
    """The member of the union `Prompt` that a prompt is validated as, by its first element."""
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
    include_obfuscation: bool | None = Field(
        None, description="Must be false: chunks are not padded."
    )


KIND_TYPES: dict[str, Any] = {
    "number": float,
    "whole": int,
    "flag": bool,
    "text": str,
    "stops": Stop,
    "ids": TokenIds,
    "texts": list[NonEmptyName],
}
"""The type of a value, by `RequestField.kind`."""


def _http_field(field: RequestField) -> tuple[Any, Any]:
    """The type and the pydantic Field of a request field."""
    bounds: dict[str, Any] = dict(field.bounds if field.http_schema is None else field.http_schema)
    value_type: Any = Literal[field.choices] if field.choices else KIND_TYPES.get(field.kind)
    if field.kind == "biases":
        value_type = Annotated[
            dict[TokenIdKey, Annotated[float, Field(**bounds)]], MaxKeys(MAX_BIASES)
        ]
        bounds = {}
    return value_type | None, Field(None, **{"description": field.help} | bounds)


def common_fields_model(fields: Iterable[RequestField]) -> type[StrictObject]:
    """A model with these fields. `null` is the default of each."""
    found: dict[str, Any] = {
        field.http: _http_field(field) for field in fields if field.http is not None
    }
    return create_model("RequestFields", __base__=StrictObject, **found)


class CommonFields(common_fields_model(REQUEST_FIELDS)):  # type: ignore[misc]
    """The fields that all endpoints have."""

    model: Name
    stream: bool | None = None
    user: Name | None = Field(None, description="Not used.")
    prompt_cache_key: Name | None = Field(None, description="Not used.")
    safety_identifier: Name | None = Field(None, description="Not used.")
    speculative: bool | None = Field(
        None, description="false: plain decoding, as plan `ar`. The text is the same."
    )


class GenerationRequest(StructuredOutputFields, CommonFields):
    """The fields that completions and chats have."""

    n: int | None = Field(
        None, ge=1, le=128, description="Sequences; number i is sampled with seed + i."
    )
    max_tokens: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = Field(None, description="Not used.")
    pass_details: bool | None = Field(
        None, description="Return the tokens of each pass, each with its source."
    )

    service_tier: Any = only("auto", "default")
    store: Any = only(False)

    length_penalty: Any = only(1)
    prompt_logprobs: Any = only()
    truncate_prompt_tokens: Any = only()
    use_beam_search: Any = only(False)
    early_stopping: Any = only(False)
    detokenize: Any = only(True)
    skip_special_tokens: Any = only(True)
    spaces_between_special_tokens: Any = only(True)
    include_stop_str_in_output: Any = only(False)
    priority: Any = only(0)
    logits_processors: Any = only([])
    return_token_ids: Any = only(False)
    return_tokens_as_token_ids: Any = only(False)


class CompletionRequest(GenerationRequest):
    """/v1/completions"""

    prompt: Prompt = Field(description="Text or token ids, of one prompt or several.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(
        None, ge=1, le=128, description="Generate this many, and return the n likeliest."
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    suffix: Text | None = Field(None, description="Must be null or empty.")
    add_special_tokens: Any = only(True)


class ChatRequest(GenerationRequest):
    """/v1/chat/completions"""

    messages: Messages
    best_of: Any = only(1)
    echo: Any = only(False)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = Field(
        None, description="Default auto if there are tools. none: they are not shown to the model."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call, if calls are required."
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Variables that the model's chat template reads."
    )
    functions: Any = only([])
    function_call: Any = only("none", "auto")
    modalities: Any = only(["text"])
    audio: Any = only()
    prediction: Any = only()
    reasoning_effort: Any = only("none")
    verbosity: Any = only("medium")
    web_search_options: Any = only()
    add_generation_prompt: Any = only(True)
    continue_final_message: Any = only(False)
    add_special_tokens: Any = only(False)
    chat_template: Any = only()
    documents: Any = only([])
