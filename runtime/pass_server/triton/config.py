"""The tensors and parameters of a Triton model, in config.pbtxt. Most tensors are those of Triton's
vLLM backend and OpenAI frontend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pass_runtime import REQUEST_OPTIONS, LoadOptions, Option, PassError, options_of
from pass_server.serve_options import ListenOptions, ServeOptions

Dtype = Literal["STRING", "BOOL", "INT32", "UINT32", "UINT64", "FP32"]


@dataclass(frozen=True)
class TensorSpec:
    """An input or output. dims: how many elements it has; -1: any number."""

    name: str
    dtype: Dtype
    dims: Literal[1, -1] = 1
    optional: bool = True


TEXT_INPUT = TensorSpec("text_input", "STRING", optional=False)
INPUT_IDS = TensorSpec("input_ids", "INT32", -1, optional=False)

DTYPES: Mapping[type, Dtype] = {float: "FP32", int: "INT32", bool: "BOOL", str: "STRING"}
SAMPLING_INPUTS = (
    *(
        TensorSpec(
            each.triton,
            "UINT64" if each.bounds.get("lt") == 1 << 64 else DTYPES[each.type],
            1 if each.shape == "one" else -1,
        )
        for each in REQUEST_OPTIONS.values()
        if each.triton is not None
    ),
    TensorSpec("speculative", "BOOL"),
)
"""How to sample and decode. `sampling_parameters` may have the same, as JSON."""

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
"""What responses contain. Without `stream` there is one response."""
EXCLUDE_INPUT = TensorSpec("exclude_input_in_output", "BOOL")

TEXT_OUTPUT = TensorSpec("text_output", "STRING", -1)
OUTPUT_IDS = TensorSpec("output_ids", "INT32", -1)
OPTIONAL_OUTPUTS = (
    *(TensorSpec("finish_reason", "STRING", -1), TensorSpec("cumulative_logprob", "FP32", -1)),
    *(TensorSpec("logprobs", "STRING", -1), TensorSpec("num_input_tokens", "UINT32")),
    *(TensorSpec("num_output_tokens", "UINT32", -1), TensorSpec("statistics", "STRING", -1)),
)
"""Sent if the input `return_<name>` is true."""


def inputs(*, tokens: bool) -> tuple[TensorSpec, ...]:
    """Return the inputs of a model that reads token ids, or text."""
    first = (INPUT_IDS,) if tokens else (TEXT_INPUT, EXCLUDE_INPUT)
    return (*first, *RESPONSE_FLAGS, SAMPLING_PARAMETERS, *SAMPLING_INPUTS)


def outputs(*, tokens: bool) -> tuple[TensorSpec, ...]:
    """Return the outputs of a model that writes token ids, or text."""
    return (OUTPUT_IDS if tokens else TEXT_OUTPUT, *OPTIONAL_OUTPUTS)


DRAIN_SECONDS = 20.0
"""Less than Triton's default `--exit-timeout-secs`, 30 s, within which it unloads models."""
LOAD_PARAMETERS = {
    name: each
    for name, each in options_of(LoadOptions).items()
    if name not in ("max_queue", "verify")
}
LIMITS = ("max_queue", "max_prompt_tokens", "max_output_tokens", "request_seconds", "reuse_prefix")
LIMIT_PARAMETERS = {name: options_of(ServeOptions)[name] for name in LIMITS}
PARAMETERS: Mapping[str, Option] = {
    **LOAD_PARAMETERS,
    **LIMIT_PARAMETERS,
    "drain_seconds": replace(options_of(ListenOptions)["drain_seconds"], default=DRAIN_SECONDS),
}
"""The parameters of a Triton model in config.pbtxt besides `bundle` and `tokens`."""


@dataclass(frozen=True)
class Settings:
    """The settings of a model. bundle: may be relative to the model's directory. tokens: the model
    reads and writes token ids, not text."""

    bundle: str
    tokens: bool
    load: LoadOptions
    serve: ServeOptions
    drain_seconds: float = DRAIN_SECONDS

    def path(self, model_directory: Path) -> Path:
        return model_directory / self.bundle


def make_settings(bundle: str, *, tokens: bool, **values: Any) -> Settings:
    """Make settings of the values of PARAMETERS. Raises PassError if one is invalid."""
    limits = {name: values[name] for name in LIMIT_PARAMETERS if name in values}
    load_values = {name: values[name] for name in LOAD_PARAMETERS if name in values}
    # None: a default for many sequences, or what the engines were built for
    load = LoadOptions(**{"max_batch_size": None, **load_values})
    listen = ListenOptions(drain_seconds=values.get("drain_seconds", DRAIN_SECONDS))
    return Settings(bundle, tokens, load, ServeOptions(**limits), listen.drain_seconds)


def read_settings(parameters: Mapping[str, str]) -> Settings:
    """Return the settings in a config.pbtxt. Parameters in capitals are Triton's own."""
    own = {name: text for name, text in parameters.items() if not name.isupper()}
    if not own.get("bundle"):
        raise PassError("config.pbtxt has no parameter `bundle`; write it with pass-export triton")
    bundle, tokens = own.pop("bundle"), _read("tokens", own.pop("tokens", "false"), bool)
    for name in own:
        if name not in PARAMETERS:
            raise PassError(
                f"config.pbtxt: unknown parameter {name!r}; known: {', '.join(sorted(PARAMETERS))}"
            )
    values = {name: _read(name, text, PARAMETERS[name].type) for name, text in own.items()}
    return make_settings(bundle, tokens=tokens, **values)


def _read(name: str, text: str, value_type: type) -> Any:
    try:
        if value_type is bool:
            return {"true": True, "false": False}[text.lower()]
        return value_type(text)
    except (KeyError, ValueError):
        raise PassError(
            f"config.pbtxt: {name} must be a {value_type.__name__}, not {text!r}"
        ) from None
