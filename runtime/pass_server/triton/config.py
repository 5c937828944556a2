"""The tensors and the parameters of a Triton model, which `pass-export triton` writes into config.pbtxt.

The tensors are those of Triton's vLLM backend and of its OpenAI frontend, and a few of our own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pass_runtime import REQUEST_FIELDS, LoadOptions, PassError, RequestField
from pass_server.serve_options import ServeOptions

Dtype = Literal["STRING", "BOOL", "INT32", "UINT32", "UINT64", "FP32"]


@dataclass(frozen=True)
class Field:
    """dims: 1, or -1 for any number."""

    name: str
    dtype: Dtype
    dims: Literal[1, -1] = 1
    optional: bool = True


TEXT_INPUT = Field("text_input", "STRING", optional=False)
INPUT_IDS = Field("input_ids", "INT32", -1, optional=False)

DTYPES: Mapping[str, Dtype] = {"number": "FP32", "whole": "INT32", "flag": "BOOL", "ids": "INT32"}
"""The type of an input, by the kind of a field; the others are strings."""
LISTS = ("texts", "stops", "ids")
"""Kinds whose inputs have any number of elements."""


def request_inputs(fields: Iterable[RequestField]) -> tuple[Field, ...]:
    """The inputs for these fields of a request."""
    return tuple(
        Field(field.triton, field.dtype or DTYPES.get(field.kind, "STRING"), -1 if field.kind in LISTS else 1)
        for field in fields
        if field.triton is not None
    )


SAMPLED = (*request_inputs(REQUEST_FIELDS), Field("speculative", "BOOL"))
"""Fields that decide the text, or how it is decoded. They may also be given as JSON in `sampling_parameters`."""

SAMPLING_PARAMETERS = Field("sampling_parameters", "STRING")
FLAGS = tuple(
    Field(name, "BOOL")
    for name in (
        "stream",
        "return_finish_reason",
        "return_cumulative_logprob",
        "return_logprobs",
        "return_num_input_tokens",
        "return_num_output_tokens",
        "return_statistics",
    )
)
"""Fields that choose what responses hold. Without `stream` there is one response."""
EXCLUDE_INPUT = Field("exclude_input_in_output", "BOOL")

TEXT_OUTPUT = Field("text_output", "STRING", -1)
OUTPUT_IDS = Field("output_ids", "INT32", -1)
RETURNED = (
    *(Field("finish_reason", "STRING", -1), Field("cumulative_logprob", "FP32", -1), Field("logprobs", "STRING", -1)),
    *(Field("num_input_tokens", "UINT32"), Field("num_output_tokens", "UINT32", -1), Field("statistics", "STRING", -1)),
)
"""Outputs that are there if the input `return_<name>` is true."""


def inputs(*, tokens: bool) -> tuple[Field, ...]:
    """The inputs of a model that reads token ids, or of one that reads text."""
    first = (INPUT_IDS,) if tokens else (TEXT_INPUT, EXCLUDE_INPUT)
    return (*first, *FLAGS, SAMPLING_PARAMETERS, *SAMPLED)


def outputs(*, tokens: bool) -> tuple[Field, ...]:
    return (OUTPUT_IDS if tokens else TEXT_OUTPUT, *RETURNED)


LIMITS = ("max_queue", "max_prompt_tokens", "max_output_tokens", "request_seconds", "reuse_prefix")
"""The fields of `ServeOptions` that apply to a Triton model."""
KINDS: Mapping[str, type] = {
    **dict.fromkeys(("max_queue", "max_prompt_tokens", "max_output_tokens"), int),
    **dict.fromkeys(("max_batch_size", "threads", "capacity", "speculative_max_concurrency"), int),
    **dict.fromkeys(("request_seconds", "drain_seconds"), float),
    **dict.fromkeys(("device", "logprobs_mode"), str),
    **dict.fromkeys(("reuse_prefix", "weight_cache", "prefix_cache"), bool),
}
OPENED = tuple(field.name for field in fields(LoadOptions) if field.name in KINDS and field.name not in LIMITS)
"""The fields of `LoadOptions` that a Triton model has as parameters."""
DRAIN_SECONDS = 20.0
"""Triton waits for 30 s by default, of which unloading takes some."""


@dataclass(frozen=True)
class Settings:
    """bundle: absolute, or relative to the model's directory. tokens: whether the model reads and writes token ids.
    drain_seconds: how long requests under way may take when a signal ends the server."""

    bundle: str
    tokens: bool
    load: LoadOptions
    limits: ServeOptions
    drain_seconds: float = DRAIN_SECONDS

    def path(self, model_directory: Path) -> Path:
        return model_directory / self.bundle


def make_settings(bundle: str, *, tokens: bool, **values: Any) -> Settings:
    """values: by the names in KINDS; those missing or None have their defaults. PassError for invalid ones."""
    given = {name: value for name, value in values.items() if value is not None}
    limits = ServeOptions(**{name: given[name] for name in LIMITS if name in given})
    opened: dict[str, Any] = {"max_batch_size": None} | {name: given[name] for name in OPENED if name in given}
    load = LoadOptions(**opened)
    drain_seconds = given.get("drain_seconds", DRAIN_SECONDS)
    if not 0 <= drain_seconds < float("inf"):
        raise PassError(f"drain-seconds must be at least 0, not {drain_seconds}")
    return Settings(bundle, tokens, load, limits, drain_seconds)


def read_settings(parameters: Mapping[str, str]) -> Settings:
    """The settings of a config.pbtxt. Parameters in capitals are Triton's own and are skipped."""
    own = {name: value for name, value in parameters.items() if not name.isupper()}
    if not own.get("bundle"):
        raise PassError("config.pbtxt has no parameter `bundle`; write it with pass-export triton")
    bundle, tokens = own.pop("bundle"), _read("tokens", own.pop("tokens", "false"), bool)
    for name in own:
        if name not in KINDS:
            raise PassError(f"config.pbtxt: unknown parameter {name!r}; choose of {', '.join(sorted(KINDS))}")
    return make_settings(bundle, tokens=tokens, **{name: _read(name, own[name], KINDS[name]) for name in own})


def _read(name: str, text: str, kind: type) -> Any:
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise PassError(f"config.pbtxt: {name} must be a {kind.__name__}, not {text!r}") from None
