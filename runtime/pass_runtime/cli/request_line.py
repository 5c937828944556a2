"""Reads the lines of pass-run batch: the schema of a request, and errors that name its fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from pass_runtime.bundle.request_fields import REQUEST_FIELDS
from pass_runtime.cli.flags import CONSTRAINT_FIELDS, as_constraint
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.text.chat_template import TextMessage

JSON_TYPES: dict[str, Any] = {
    "number": float,
    "whole": int,
    "flag": bool,
    "text": str,
    "texts": list[str],
    "stops": str | list[str],
    "ids": list[int],
    "biases": dict[str, float],
}
"""The JSON type of a field's value, by its `kind`."""
_FIELDS: dict[str, Any] = {
    field.name: (JSON_TYPES[field.kind] | None, None) for field in REQUEST_FIELDS
}
_Options: type[BaseModel] = create_model(
    "_Options", __config__=ConfigDict(extra="forbid", strict=True), **_FIELDS
)


class BatchRequest(_Options):  # type: ignore[misc, valid-type]
    """The request of a line, with a prompt or messages. `id` is repeated in the result. The other
    fields are those of GenerateOptions, SamplingParams and Constraint; they override the flags."""

    id: Any = None
    prompt: str | None = None
    messages: list[TextMessage] | None = None
    json_schema: dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def options(self, defaults: GenerateOptions, number: int) -> GenerateOptions:
        """Return the options of the request in line `number`, counted from 1. defaults: the values
        of the flags. Without a seed of its own, line n has that of the flags + n - 1."""
        fields = self.model_dump(exclude_none=True, exclude={"id", "prompt", "messages"})
        if "logit_bias" in fields:
            biases = fields["logit_bias"].items()
            fields["logit_bias"] = {_token_id(key): bias for key, bias in biases}
        constraint = {name: fields.pop(name) for name in CONSTRAINT_FIELDS if name in fields}
        if constraint:
            fields["constraint"] = as_constraint(constraint)
        return defaults.with_fields(**{"seed": (defaults.sampling.seed or 0) + number - 1} | fields)


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise PassError(f"logit_bias: {key!r} is not a token id") from None


def parse_request(value: dict[str, Any]) -> BatchRequest:
    """Return the request in a line's JSON object. Raises PassError for the first wrong field."""
    try:
        request: BatchRequest = BatchRequest.model_validate(value)
    except ValidationError as error:
        raise PassError(first_problem(error)) from None
    if (request.prompt is None) == (request.messages is None):
        raise PassError('a request needs "prompt" or "messages", and not both')
    return request


def first_problem(error: ValidationError) -> str:
    """Return the first problem that pydantic found: the field, and what is wrong with it."""
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    return f"{field}: {problem['msg']}" if field else problem["msg"]
