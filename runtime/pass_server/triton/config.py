"""The tensors and parameters of a Triton model. `pass-export triton` writes them into config.pbtxt,
and the model reads its settings from there.

The tensors are those of Triton's vLLM backend and of its OpenAI frontend, and a few more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pass_runtime import REQUEST_FIELDS, LoadOptions, OptionField, PassError, RequestField
from pass_server.serve_options import ListenOptions, ServeOptions

Dtype = Literal["STRING", "BOOL", "INT32", "UINT32", "UINT64", "FP32"]


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of the model. dims: how many elements it has; -1: any number."""

    name: str
    dtype: Dtype
    dims: Literal[1, -1] = 1
    optional: bool = True


TEXT_INPUT = TensorSpec("text_input", "STRING", optional=False)
INPUT_IDS = TensorSpec("input_ids", "INT32", -1, optional=False)

DTYPES: Mapping[str, Dtype] = {"number": "FP32", "whole": "INT32", "flag": "BOOL", "ids": "INT32"}
"""The dtype of a field's input, by `RequestField.kind`. Inputs of other kinds are strings."""
LIST_KINDS = ("texts", "stops", "ids")
"""The kinds of fields whose inputs may have any number of elements."""


def request_inputs(fields: Iterable[RequestField]) -> tuple[TensorSpec, ...]:
    """Return the inputs for those of the fields that Triton models have."""
    return tuple(
        TensorSpec(
            field.triton,
            field.dtype or DTYPES.get(field.kind, "STRING"),
            -1 if field.kind in LIST_KINDS else 1,
        )
        for field in fields
        if field.triton is not None
    )


SAMPLING_INPUTS = (*request_inputs(REQUEST_FIELDS), TensorSpec("speculative", "BOOL"))
"""Inputs that say how to sample and decode. `sampling_parameters` may have the same, as JSON."""

SAMPLING_PARAMETERS = TensorSpec("sampling_parameters", "STRING")
RESPONSE_FLAGS = tuple(
    TensorSpec(name, "BOOL")
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
"""Inputs that say what responses contain. Without `stream` there is one response."""
EXCLUDE_INPUT = TensorSpec("exclude_input_in_output", "BOOL")

TEXT_OUTPUT = TensorSpec("text_output", "STRING", -1)
OUTPUT_IDS = TensorSpec("output_ids", "INT32", -1)
OPTIONAL_OUTPUTS = (
    *(TensorSpec("finish_reason", "STRING", -1), TensorSpec("cumulative_logprob", "FP32", -1)),
    *(TensorSpec("logprobs", "STRING", -1), TensorSpec("num_input_tokens", "UINT32")),
    *(TensorSpec("num_output_tokens", "UINT32", -1), TensorSpec("statistics", "STRING", -1)),
)
"""Outputs that a response has if the input `return_<name>` is true."""


def inputs(*, tokens: bool) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model. tokens: whether it reads token ids and not text."""
    first = (INPUT_IDS,) if tokens else (TEXT_INPUT, EXCLUDE_INPUT)
    return (*first, *RESPONSE_FLAGS, SAMPLING_PARAMETERS, *SAMPLING_INPUTS)


def outputs(*, tokens: bool) -> tuple[TensorSpec, ...]:
    """Return the outputs of a model. tokens: whether it writes token ids and not text."""
    return (OUTPUT_IDS if tokens else TEXT_OUTPUT, *OPTIONAL_OUTPUTS)


DRAIN_SECONDS = 20.0
"""The default of `drain_seconds`. It is less than Triton's default `--exit-timeout-secs`, 30 s,
within which Triton unloads its models."""
LOAD_PARAMETERS = {
    name: field
    for name, field in LoadOptions.option_fields().items()
    if name not in ("max_queue", "verify")
}
LIMIT_PARAMETERS = {
    name: ServeOptions.option_fields()[name]
    for name in (
        "max_queue",
        "max_prompt_tokens",
        "max_output_tokens",
        "request_seconds",
        "reuse_prefix",
    )
}
PARAMETERS: Mapping[str, OptionField] = {
    **LOAD_PARAMETERS,
    **LIMIT_PARAMETERS,
    "drain_seconds": replace(ListenOptions.option_fields()["drain_seconds"], default=DRAIN_SECONDS),
}
"""The parameters of a Triton model in config.pbtxt besides `bundle` and `tokens`: fields of
`LoadOptions` and `ServeOptions`, and how long requests may go on after a signal."""


@dataclass(frozen=True)
class Settings:
    """The settings of a Triton model. bundle: its path, absolute or relative to the model's
    directory. tokens: whether the model reads and writes token ids and not text. drain_seconds: how
    long requests under way may go on after a signal."""

    bundle: str
    tokens: bool
    load: LoadOptions
    serve: ServeOptions
    drain_seconds: float = DRAIN_SECONDS

    def path(self, model_directory: Path) -> Path:
        """Return the path of the bundle."""
        return model_directory / self.bundle


def make_settings(bundle: str, *, tokens: bool, **values: Any) -> Settings:
    """Make settings. values: the values of PARAMETERS. Raises PassError if a value is invalid."""
    limits = {name: values[name] for name in LIMIT_PARAMETERS if name in values}
    load_values = {name: values[name] for name in LOAD_PARAMETERS if name in values}
    # None, as for other servers: a default for many sequences, or what the engines were built for.
    load = LoadOptions(**{"max_batch_size": None, **load_values})
    drain_seconds = PARAMETERS["drain_seconds"].checked(values.get("drain_seconds", DRAIN_SECONDS))
    return Settings(bundle, tokens, load, ServeOptions(**limits), drain_seconds)


def read_settings(parameters: Mapping[str, str]) -> Settings:
    """Return the settings in a config.pbtxt. Parameters in capitals are Triton's own."""
    own = {name: value for name, value in parameters.items() if not name.isupper()}
    if not own.get("bundle"):
        raise PassError("config.pbtxt has no parameter `bundle`; write it with pass-export triton")
    bundle, tokens = own.pop("bundle"), _read("tokens", own.pop("tokens", "false"), "flag")
    for name in own:
        if name not in PARAMETERS:
            raise PassError(
                f"config.pbtxt: unknown parameter {name!r}; known: {', '.join(sorted(PARAMETERS))}"
            )
    return make_settings(
        bundle,
        tokens=tokens,
        **{name: _read(name, own[name], PARAMETERS[name].kind) for name in own},
    )


def _read(name: str, text: str, kind: str) -> Any:
    value_type = {"whole": int, "number": float, "flag": bool}.get(kind, str)
    try:
        if kind == "flag":
            return {"true": True, "false": False}[text.lower()]
        return value_type(text)
    except (KeyError, ValueError):
        raise PassError(
            f"config.pbtxt: {name} must be a {value_type.__name__}, not {text!r}"
        ) from None
