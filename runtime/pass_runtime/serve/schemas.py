"""What clients may ask: OpenAI's fields, and a few of our own. Strict types; what is not listed is refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from pass_runtime.bundle.sampling import MAX_CANDIDATES, MAX_LOGPROBS

Ids = list[int]
Stop = str | Annotated[list[str], Field(max_length=16)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Only false: chunks are not padded.")


class Sampled(Fields):
    """What both endpoints take. `null` is the default of every field."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are taken only with these values, besides null: with others they would change the answer."""

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

    frequency_penalty: Any = Field(None, description="Only 0.")
    presence_penalty: Any = Field(None, description="Only 0.")
    logit_bias: Any = Field(None, description="Only {}.")


class CompletionRequest(Sampled):
    """/v1/completions"""

    neutral = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }
    prompt: str | Ids | list[str] | list[Ids] = Field(description="Text or token ids, of one prompt or several.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: Any = Field(None, description="Only 1.")
    echo: Any = Field(None, description="Only false.")
    suffix: Any = Field(None, description='Only "".')


class ContentPart(BaseModel):
    """{"type": "text", "text": ...}; other types are refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None


class ChatMessage(Fields):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_calls": ([],), "annotations": ([],)}
    role: str = Field(description="system, developer (taken as system), user or assistant.")
    content: str | list[ContentPart]
    name: Any = Field(None, description="Only null, as those below.")
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    annotations: Any = None


class ChatRequest(Sampled):
    """/v1/chat/completions"""

    neutral = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "metadata": ({},),
    }
    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Any = Field(None, description="Only [].")
    tool_choice: Any = Field(None, description="Only none or auto: there are no tools.")
    functions: Any = Field(None, description="Only [].")
    function_call: Any = Field(None, description="Only none or auto.")
    parallel_tool_calls: Any = Field(None, description="Either; there are no tools.")
    response_format: Any = Field(None, description='Only {"type": "text"}.')
    modalities: Any = Field(None, description='Only ["text"].')
    audio: Any = Field(None, description="Only null.")
    prediction: Any = Field(None, description="Only null.")
    reasoning_effort: Any = Field(None, description="Only null.")
    web_search_options: Any = Field(None, description="Only null.")
    service_tier: Any = Field(None, description="Only auto or default.")
    store: Any = Field(None, description="Only false.")
    metadata: Any = Field(None, description="Only {}.")
