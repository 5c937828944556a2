"""The fields of requests: OpenAI's and a few of our own. Types are strict, and fields not listed here are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pass_runtime.bundle.sampling import MAX_BIASES, MAX_CANDIDATES, MAX_LOGPROBS, MIN_REPETITION
from pass_runtime.serve.chat_schemas import ChatMessage, NamedChoice, Tool
from pass_runtime.serve.fields import Fields, only
from pass_runtime.serve.structured import Structured

Ids = list[int]
Stop = str | Annotated[list[str], Field(max_length=16)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
NotEmpty = Annotated[str, Field(min_length=1)]


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Only false: chunks are not padded.")


class Drawn(Fields):
    """What all endpoints have: how tokens are drawn, and how fast. `null` is the default of each field."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2, description="Default 1.")
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64, description="Negative ones count from 2^64 down.")
    stop: Stop | None = None
    stream: bool | None = None
    user: str | None = Field(None, description="Not used.")
    prompt_cache_key: str | None = Field(None, description="Not used.")
    safety_identifier: str | None = Field(None, description="Not used.")

    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION, le=1 / MIN_REPETITION)
    logit_bias: dict[TokenKey, Bias] | None = Field(None, max_length=MAX_BIASES, description="By token id.")
    min_tokens: int | None = Field(None, ge=0)
    bad_words: list[NotEmpty] | None = Field(None, max_length=1024)
    allowed_token_ids: Ids | None = Field(None, min_length=1)

    top_k: int | None = Field(None, ge=-1, le=MAX_CANDIDATES, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1, description="0 is off.")
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = Field(None, max_length=64)
    speculative: bool | None = Field(None, description="false: plain decoding, as plan `ar`. The text is the same.")
    plan: str | None = Field(
        None, max_length=100, description="Changes how fast, never what, is written. Default `auto`."
    )
    lookahead: int | None = Field(None, ge=0)
    draft: Literal["lookahead", "ngram", "both"] | None = None
    cache_salt: str | None = Field(
        None, min_length=1, max_length=256, description="K/V of prompts are shared among requests with the same one."
    )


class Sampled(Structured, Drawn):
    """The fields of completions and chats."""

    n: int | None = Field(None, ge=1, le=128, description="Sequences; number i is sampled with seed + i.")
    max_tokens: int | None = Field(None, ge=1)
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = Field(None, description="Not used.")

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

    prompt: str | Ids | list[str] | list[Ids] = Field(description="Text or token ids, of one prompt or several.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=128, description="Write so many, and return the n likeliest.")
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    suffix: str | None = Field(None, description="Only null or empty.")
    add_special_tokens: Any = only(True)


class ChatRequest(Sampled):
    """/v1/chat/completions"""

    messages: list[ChatMessage] = Field(min_length=1, max_length=4096)
    best_of: Any = only(1)
    echo: Any = only(False)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = Field(
        None, description="Default auto where there are tools. With none they are not shown to the model."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most, where calls are required.")
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(
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
