"""The fields of a line of a batch, and the options that they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pass_runtime.cli.processor_options import PENALTIES, as_constraint
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.text.messages import TextMessage

CONSTRAINT = ("json_schema", "json_object", "regex", "choice", "grammar")


class BatchRequest(BaseModel):
    """A prompt or a conversation. All other fields but `id` are of GenerateOptions, SamplingParams and Constraint, and
    override the flags."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: Any = None
    prompt: str | None = None
    messages: list[TextMessage] | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    plan: str | None = None
    lookahead: int | None = None
    draft: str | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    json_schema: dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def options(self, defaults: GenerateOptions, number: int) -> GenerateOptions:
        """The flags, overridden by this line's values. A line without a seed of its own has seed + number - 1."""
        own = self.model_dump(exclude_none=True, exclude={"id", "prompt", "messages"})
        keys = ("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias", *PENALTIES)
        sampling = {key: own.pop(key) for key in keys if key in own}
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {_token(token): bias for token, bias in sampling["logit_bias"].items()}
        constraint = {key: own.pop(key) for key in CONSTRAINT if key in own}
        if constraint:
            own["constraint"] = as_constraint(constraint)
        sampling.setdefault("seed", (defaults.sampling.seed or 0) + number - 1)
        return dataclasses.replace(defaults, sampling=dataclasses.replace(defaults.sampling, **sampling), **own)


def _token(written: str) -> int:
    """The token id that a key of logit_bias spells."""
    try:
        return int(written)
    except ValueError:
        raise PassError(f"logit_bias: {written!r} is not a token id") from None


def parse_line(value: dict[str, Any]) -> BatchRequest:
    """PassError names the first field that is wrong."""
    try:
        request = BatchRequest.model_validate(value)
    except ValidationError as error:
        raise PassError(first_problem(error)) from None
    if (request.prompt is None) == (request.messages is None):
        raise PassError('a request needs either "prompt" or "messages"')
    return request


def first_problem(error: ValidationError) -> str:
    """The first problem that pydantic found, in one line."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]
