"""The tensors of a Triton model: those of Triton's vLLM backend and of its OpenAI frontend, and a few of our own.

`pass-export triton` writes them into config.pbtxt; `reading.py` and `output_tensors.py` use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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

SAMPLED = (
    *(Field("max_tokens", "INT32"), Field("temperature", "FP32"), Field("top_p", "FP32"), Field("top_k", "INT32")),
    *(Field("min_p", "FP32"), Field("seed", "UINT64"), Field("stop_words", "STRING", -1)),
    *(Field("stop_token_ids", "INT32", -1), Field("ignore_eos", "BOOL")),
    *(Field("presence_penalty", "FP32"), Field("frequency_penalty", "FP32"), Field("repetition_penalty", "FP32")),
    *(Field("plan", "STRING"), Field("speculative", "BOOL"), Field("lookahead", "INT32"), Field("draft", "STRING")),
)
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
"""Outputs that are there where the input `return_<name>` is true."""


def inputs(*, tokens: bool) -> tuple[Field, ...]:
    """The inputs of a model that reads token ids, or of one that reads text."""
    first = (INPUT_IDS,) if tokens else (TEXT_INPUT, EXCLUDE_INPUT)
    return (*first, *FLAGS, SAMPLING_PARAMETERS, *SAMPLED)


def outputs(*, tokens: bool) -> tuple[Field, ...]:
    return (OUTPUT_IDS if tokens else TEXT_OUTPUT, *RETURNED)
