"""What clients may ask: OpenAI's fields, and a few of our own. Strict types; what is not listed is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from pass_runtime.bundle.sampling import MAX_CANDIDATES, MAX_LOGPROBS

Ids = list[int]
Stop = str | Annotated[list[str], Field(max_length=16)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def only(*neutral: Any) -> Any:
    """A field that is taken with null and these values alone: others would change the answer. Its type is Any."""
    return Field(None, json_schema_extra={"enum": [None, *neutral]})


def unsupported(fields: BaseModel) -> str | None:
    """The first field that has a value that is not one of its `only`."""
    for name, info in type(fields).model_fields.items():
        extra, value = info.json_schema_extra, getattr(fields, name)
        if isinstance(extra, dict) and not any(_same(value, neutral) for neutral in cast(list[Any], extra["enum"])):
            return name
    return None


def _same(value: Any, neutral: Any) -> bool:
    """In Python, 0 equals False."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Only false: chunks are not padded.")


class Sampled(Fields):
    """What both endpoints take. `null` is the default of every field."""

    model: str
    n: int | None = Field(None, ge=1, le=128, description="Sequences; number i is sampled with seed + i.")
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, description="1 where nobody says.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64, description="Negative ones count from 2^64 down.")
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Not used.")

    top_k: int | None = Field(None, ge=0, le=MAX_CANDIDATES, description="0 is off.")
    min_p: float | None = Field(None, ge=0, le=1, description="0 is off.")
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = Field(None, max_length=64)
    speculative: bool | None = Field(None, description="false: plain decoding, as plan `ar`. The text is the same.")
    plan: str | None = Field(None, max_length=100, description="How, never what; `auto` where nobody says.")
    lookahead: int | None = Field(None, ge=0)
    draft: Literal["lookahead", "ngram", "both"] | None = None

    frequency_penalty: Any = only(0)
    presence_penalty: Any = only(0)
    logit_bias: Any = only({})


class CompletionRequest(Sampled):
    """/v1/completions"""

    prompt: str | Ids | list[str] | list[Ids] = Field(description="Text or token ids, of one prompt or several.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: Any = only(1)
    echo: Any = only(False)
    suffix: Any = only("")


class ContentPart(BaseModel):
    """{"type": "text", "text": ...}; other types are refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None


class ChatMessage(Fields):
    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer is taken as system.")
    content: str | list[ContentPart]
    name: Any = only()
    refusal: Any = only()
    audio: Any = only()
    function_call: Any = only()
    tool_calls: Any = only([])
    tool_call_id: Any = only()
    annotations: Any = only([])


class ChatRequest(Sampled):
    """/v1/chat/completions"""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Any = only([])
    tool_choice: Any = only("none", "auto")
    functions: Any = only([])
    function_call: Any = only("none", "auto")
    parallel_tool_calls: Any = only(True, False)
    response_format: Any = only({"type": "text"})
    modalities: Any = only(["text"])
    audio: Any = only()
    prediction: Any = only()
    reasoning_effort: Any = only()
    web_search_options: Any = only()
    service_tier: Any = only("auto", "default")
    store: Any = only(False)
    metadata: Any = only({})
