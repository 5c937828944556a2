"""From a request's tensors to what `pass_runtime.serve.jobs` reads: the fields of a completion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from pass_runtime.serve.errors import ApiError, of_validation
from pass_runtime.serve.schemas import CompletionRequest, only
from pass_runtime.serve.triton.fields import EXCLUDE_INPUT, FLAGS, INPUT_IDS, SAMPLED, SAMPLING_PARAMETERS, TEXT_INPUT

Tensors = Mapping[str, np.ndarray]
"""By name, those that a request has."""


class TritonRequest(CompletionRequest):
    """A completion of one sequence. What vLLM's `sampling_parameters` may say besides has to be neutral."""

    n: Any = only(1)
    repetition_penalty: Any = only(1)
    length_penalty: Any = only(1)
    min_tokens: Any = only(0)
    bad_words: Any = only([])
    allowed_token_ids: Any = only()
    prompt_logprobs: Any = only()
    guided_decoding: Any = only()
    lora_name: Any = only()
    use_beam_search: Any = only(False)
    early_stopping: Any = only(False)
    detokenize: Any = only(True)
    skip_special_tokens: Any = only(True)
    spaces_between_special_tokens: Any = only(True)
    include_stop_str_in_output: Any = only(False)


@dataclass(frozen=True)
class Wanted:
    """How an answer is told. returned: which of the `return_...` were asked for. prefix: text before the answer's."""

    stream: bool
    returned: frozenset[str]
    prefix: str = ""


def read_request(model: str, tensors: Tensors, parameters: str) -> tuple[TritonRequest, Wanted]:
    """parameters: the request's own, as JSON; they count where `sampling_parameters` says nothing. ApiError for what
    cannot be read."""
    asked = {field.name: value for field in SAMPLED if (value := _value(tensors, field.name, field.dims)) is not None}
    if "stop_words" in asked:
        asked["stop"] = asked.pop("stop_words")
    flags = {field.name: bool(_value(tensors, field.name)) for field in FLAGS}
    for more in (_value(tensors, SAMPLING_PARAMETERS.name), _own(parameters)):
        _merge(asked, _json_object(more) if more is not None else {})
    _as_completion(asked, logprobs=flags["return_logprobs"] or flags["return_cumulative_logprob"])
    text = _value(tensors, TEXT_INPUT.name)
    prompt = text if text is not None else _value(tensors, INPUT_IDS.name, -1)
    if prompt is None:
        raise ApiError("the request has no prompt", param=TEXT_INPUT.name)
    try:
        request = TritonRequest(model=model, prompt=prompt, **asked)
    except ValidationError as error:
        problem = error.errors()[0]
        raise of_validation({**problem, "loc": ("", *problem["loc"])}) from None
    return request, _wanted(flags, tensors, text)


def _wanted(flags: dict[str, bool], tensors: Tensors, text: Any) -> Wanted:
    stream = flags.pop("stream")
    prefix = text if _value(tensors, EXCLUDE_INPUT.name) is False else ""
    if prefix and stream:
        raise ApiError(f"{EXCLUDE_INPUT.name} must be true in a stream", param=EXCLUDE_INPUT.name)
    return Wanted(stream, frozenset(name for name, wanted in flags.items() if wanted), prefix)


def _value(tensors: Tensors, name: str, dims: int = 1) -> Any:
    """A tensor as Python has it; None where the request has none of that name."""
    if (found := tensors.get(name)) is None:
        return None
    values = [_scalar(name, value) for value in found.reshape(-1)]
    if dims != 1:
        return values
    if len(values) != 1:
        raise ApiError(f"{name} must have one element, not {len(values)}", param=name)
    return values[0]


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, bytes | str):
        try:
            return value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError:
            raise ApiError(f"{name} is not valid UTF-8 text", param=name) from None
    if isinstance(value, np.float32):
        return float(str(value))  # 0.8, as it was meant, rather than 0.800000011920929
    return value.item()


def _own(parameters: str) -> str | None:
    """The parameters that a client gave: Triton has some of its own among them."""
    found = _json_object(parameters) if parameters else {}
    kept = {name: value for name, value in found.items() if not name.startswith("triton_")}
    return json.dumps(kept) if kept else None


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(f"{SAMPLING_PARAMETERS.name} is not a JSON object", param=SAMPLING_PARAMETERS.name)
    return found


def _merge(asked: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if name in asked and asked[name] != value:
            raise ApiError(f"{name} is given twice, and not the same", param=name)
        if name in ("model", "prompt", "stream", "stream_options"):
            raise ApiError(f"{name} is not a sampling parameter", param=name)
        asked[name] = value


def _as_completion(asked: dict[str, Any], *, logprobs: bool) -> None:
    """In the words of `TritonRequest`: vLLM's and the OpenAI frontend's have other ones for "off"."""
    if asked.get("top_k") == -1:
        asked["top_k"] = 0
    top = asked.pop("top_logprobs", None)
    told = asked.get("logprobs")
    if isinstance(told, bool):  # a chat's
        asked["logprobs"] = (top or 0) if told else None
    if top and told is not True:
        raise ApiError("top_logprobs need logprobs to be true", param="top_logprobs")
    if logprobs and asked.get("logprobs") is None:
        asked["logprobs"] = 0
