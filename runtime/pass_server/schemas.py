"""The fields of requests, OpenAI's, vLLM's and our own. Types are strict, and unlisted fields are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, create_model

from pass_runtime import MAX_BIASES, MAX_LOGPROBS, REQUEST_FIELDS, Constraint, PassError, RequestField
from pass_server.api_error import ApiError
from pass_server.fields import (
    MAX_IDS,
    MAX_LIST,
    MAX_NAME,
    Fields,
    JsonSchema,
    MaxKeys,
    Messages,
    Name,
    NamedChoice,
    Text,
    Tools,
    only,
)

Choices = Annotated[list[Text], Field(max_length=MAX_LIST, fail_fast=True)]


class NamedSchema(Fields):
    """`json_schema` of a response format. The schema is enforced whether `strict` is true or not."""

    name: Name | None = Field(None, description="Not used.")
    description: Text | None = Field(None, description="Not used.")
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's: exactly one of these."""

    json_schema: JsonSchema | Text | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = Field(None, description="llguidance's variant of Lark.")


class Structured(Fields):
    """The fields of a request that say what its text must look like; at most one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | Text | None = Field(None, description="As structured_outputs.json.")
    guided_regex: Text | None = Field(None, description="As structured_outputs.regex.")
    guided_choice: Choices | None = Field(None, description="As structured_outputs.choice.")
    guided_grammar: Text | None = Field(None, description="As structured_outputs.grammar.")


def constraint_of(request: Structured) -> tuple[str, Constraint] | None:
    """The field that says what the text must look like, and what that is. Raises ApiError if there are several."""
    wanted = dict(_wanted(request))
    if len(wanted) > 1:
        raise ApiError(f"give one of {' and '.join(wanted)}", param=[*wanted][-1])
    for param, fields in wanted.items():
        try:
            return param, Constraint(**fields)
        except PassError as error:
            raise ApiError(str(error), param=param) from None
    return None


def _wanted(request: Structured) -> list[tuple[str, dict[str, Any]]]:
    """Each field that asks for something, with the fields of `Constraint` that it stands for."""
    found: list[tuple[str, dict[str, Any]]] = []
    if (form := request.response_format) is not None and form.type != "text":
        found.append(("response_format", _of_format(form)))
    if (own := request.structured_outputs) is not None:
        fields = {name: value for name in type(own).model_fields if (value := getattr(own, name)) not in (None, False)}
        found.append(("structured_outputs", fields))
    for param in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if (value := getattr(request, param)) is not None:
            name = param.removeprefix("guided_")
            found.append((param, {"json_schema" if name == "json" else name: value}))
    return found


def _of_format(form: ResponseFormat) -> dict[str, Any]:
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None or form.json_schema.json_schema is None:
        raise ApiError("a response format of type json_schema needs json_schema.schema", param="response_format")
    return {"json_schema": form.json_schema.json_schema}


Ids = Annotated[list[int], Field(max_length=MAX_IDS, fail_fast=True)]
MAX_PROMPTS = 4096
"""The most prompts of a request, whatever a server's own limit is."""
Stop = Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
NotEmpty = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
Metadata = Annotated[dict[Name, Name], MaxKeys(64)]
TemplateVariables = Annotated[dict[Name, Text | int | float | bool | None], MaxKeys(64)]


def _kind(prompt: Any) -> str:
    """The type that a prompt's first element says it is to have, so that it is validated as that one alone."""
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else 0
    return "list[str]" if isinstance(first, str) else "list[list[int]]" if isinstance(first, list) else "list[int]"


Prompt = Annotated[
    Annotated[Text, Tag("str")]
    | Annotated[list[int], Field(min_length=1, max_length=MAX_IDS, fail_fast=True), Tag("list[int]")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("list[str]")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("list[list[int]]")],
    Discriminator(_kind),
]


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Only false: chunks are not padded.")


TYPES: dict[str, Any] = {"number": float, "whole": int, "flag": bool, "text": str, "stops": Stop, "ids": Ids}
TYPES["texts"] = list[NotEmpty]
"""The type of a value, by the kind of a field."""


def _http_field(field: RequestField) -> tuple[Any, Any]:
    """A field's type and what else pydantic knows of it."""
    bounds: dict[str, Any] = dict(field.bounds if field.http_schema is None else field.http_schema)
    of: Any = Literal[field.choices] if field.choices else TYPES.get(field.kind)
    if field.kind == "biases":
        of = Annotated[dict[TokenKey, Annotated[float, Field(**bounds)]], MaxKeys(MAX_BIASES)]
        bounds = {}
    return of | None, Field(None, **{"description": field.help} | bounds)


def request_model(fields: Iterable[RequestField]) -> type[Fields]:
    """The fields that all endpoints have. `null` is the default of each."""
    found: dict[str, Any] = {field.http: _http_field(field) for field in fields if field.http is not None}
    return create_model("RequestFields", __base__=Fields, **found)


class Drawn(request_model(REQUEST_FIELDS)):  # type: ignore[misc]
    """What all endpoints have: how tokens are drawn, and how fast."""

    model: Name
    stream: bool | None = None
    user: Name | None = Field(None, description="Not used.")
    prompt_cache_key: Name | None = Field(None, description="Not used.")
    safety_identifier: Name | None = Field(None, description="Not used.")
    speculative: bool | None = Field(None, description="false: plain decoding, as plan `ar`. The text is the same.")


class Sampled(Structured, Drawn):
    """The fields of completions and chats."""

    n: int | None = Field(None, ge=1, le=128, description="Sequences; number i is sampled with seed + i.")
    max_tokens: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = Field(None, description="Not used.")
    pass_details: bool | None = Field(None, description="Tell the tokens of each pass, and where each came from.")

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


class CompletionRequest(Sampled):
    """/v1/completions"""

    prompt: Prompt = Field(description="Text or token ids, of one prompt or several.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=128, description="Write so many, and return the n likeliest.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    suffix: Text | None = Field(None, description="Only null or empty.")
    add_special_tokens: Any = only(True)


class ChatRequest(Sampled):
    """/v1/chat/completions"""

    messages: Messages
    best_of: Any = only(1)
    echo: Any = only(False)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = Field(
        None, description="Default auto if there are tools. With none they are not shown to the model."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most, where calls are required.")
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
