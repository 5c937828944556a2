"""Reads the fields of a completion from Triton's input tensors, and makes output tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import ValidationError

from pass_runtime import REQUEST_OPTIONS, Token
from pass_server.answers import Choice, TokenTexts, finite, pass_field
from pass_server.api_error import ApiError, validation_error
from pass_server.schemas import CompletionRequest
from pass_server.triton import config

HTTP_NAMES = {
    each.triton: each.http for each in REQUEST_OPTIONS.values() if each.triton and each.http
}
"""Fields of a completion by the names of their inputs. Other inputs have their field's name."""
Tensors = Mapping[str, np.ndarray]


class TritonRequest(CompletionRequest):
    """A completion of one sequence."""

    neutral: ClassVar = {
        "n": (1,),
        "best_of": (1,),
        "echo": (False,),
        "pass_details": (False,),
        "guided_decoding": (),
        "lora_name": (),
    }


@dataclass(frozen=True)
class ResponseOptions:
    """What responses contain. stream: one for every pass. returned: the inputs `return_...` that
    are true. prefix: the prompt's text if the output repeats it."""

    stream: bool
    returned: frozenset[str]
    prefix: str = ""


def read_request(
    model: str, tensors: Tensors, parameters: str
) -> tuple[TritonRequest, ResponseOptions]:
    """Return the completion that a request asks for, and what its responses contain. parameters:
    JSON of the request's parameters, which may have what `sampling_parameters` may."""
    inputs = {
        HTTP_NAMES.get(each.name, each.name): _value(tensors, each.name, each.dims)
        for each in config.SAMPLING_INPUTS
    }
    fields = {name: value for name, value in inputs.items() if value is not None}
    flags = {field.name: bool(_value(tensors, field.name)) for field in config.RESPONSE_FLAGS}
    in_tensor = _value(tensors, config.SAMPLING_PARAMETERS.name)
    _merge(fields, {} if in_tensor is None else _json_object(in_tensor))
    own = _json_object(parameters) if parameters else {}
    _merge(fields, {name: own[name] for name in own if not name.startswith("triton_")})
    logprobs = flags["return_logprobs"] or flags["return_cumulative_logprob"]
    _rename_chat_logprobs(fields, logprobs=logprobs)
    text = _value(tensors, config.TEXT_INPUT.name)
    prompt = text if text is not None else _value(tensors, config.INPUT_IDS.name, -1)
    if prompt is None:
        raise ApiError("the request has no prompt", param=config.TEXT_INPUT.name)
    try:
        request = TritonRequest(model=model, prompt=prompt, **fields)
    except ValidationError as error:
        raise validation_error(error) from None
    stream = flags.pop("stream")
    prefix = text if _value(tensors, config.EXCLUDE_INPUT.name) is False else ""
    if prefix and stream:
        param = config.EXCLUDE_INPUT.name
        raise ApiError(f"{param} must be true in a stream", param=param)
    returned = frozenset(name for name in flags if flags[name])
    return request, ResponseOptions(stream, returned, prefix)


def _value(tensors: Tensors, name: str, dims: int = 1) -> Any:
    """Return a tensor as Python values; None if there is none."""
    if (tensor := tensors.get(name)) is None:
        return None
    values = [_scalar(name, value) for value in tensor.reshape(-1)]
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
        return float(str(value))  # the shortest decimal: 0.8 rather than 0.800000011920929
    return value.item()


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        name = config.SAMPLING_PARAMETERS.name
        raise ApiError(f"{name} is not a JSON object", param=name)
    return value


def _merge(fields: dict[str, Any], parameters: dict[str, Any]) -> None:
    for name, value in parameters.items():
        if name in fields and fields[name] != value:
            raise ApiError(f"{name} is given twice with different values", param=name)
        if name in ("model", "prompt", "stream", "stream_options"):
            raise ApiError(f"{name} is not a sampling parameter", param=name)
        fields[name] = value


def _rename_chat_logprobs(fields: dict[str, Any], *, logprobs: bool) -> None:
    """Make a completion's `logprobs` (int) of a chat's `logprobs` (bool) and `top_logprobs`, which
    Triton's OpenAI frontend sends. logprobs: the response needs some."""
    top = fields.pop("top_logprobs", None)
    requested = fields.get("logprobs")
    if isinstance(requested, bool):
        fields["logprobs"] = (top or 0) if requested else None
    if top and requested is not True:
        raise ApiError("top_logprobs need logprobs to be true", param="top_logprobs")
    if logprobs and fields.get("logprobs") is None:
        fields["logprobs"] = 0


Arrays = dict[str, np.ndarray]


class OutputTensors:
    """Makes the output arrays of responses, with token ids or text."""

    def __init__(self, texts: TokenTexts, *, tokens: bool) -> None:
        self._texts, self._tokens = texts, tokens

    def arrays(
        self,
        options: ResponseOptions,
        choice: Choice,
        tokens: Sequence[Token],
        text: str,
        *,
        last: bool,
    ) -> Arrays:
        """Return the arrays of a response. tokens, text: those since the previous one, which
        `num_output_tokens` counts, as in vLLM."""
        generation = choice.generation
        reason = str(generation.finish_reason) if last else "None"  # as in vLLM's backend
        arrays = self._text(options.prefix + text, tokens) | {
            "finish_reason": _strings(reason),
            "num_input_tokens": np.array([len(generation.prompt_ids)], np.uint32),
            "num_output_tokens": np.array([len(tokens)], np.uint32),
        }
        if "return_cumulative_logprob" in options.returned:
            total = sum(each.logprobs.logprob for each in generation.tokens if each.logprobs)
            arrays["cumulative_logprob"] = np.array([total], np.float32)
        if "return_logprobs" in options.returned:
            arrays["logprobs"] = _strings(json.dumps([self._logprobs(token) for token in tokens]))
        if last and "return_statistics" in options.returned:
            arrays["statistics"] = _strings(json.dumps(pass_field(generation)))
        always = (config.TEXT_OUTPUT.name, config.OUTPUT_IDS.name)
        return {
            name: array
            for name, array in arrays.items()
            if name in always or f"return_{name}" in options.returned
        }

    def _text(self, text: str, tokens: Sequence[Token]) -> Arrays:
        if self._tokens:
            return {config.OUTPUT_IDS.name: np.array([token.id for token in tokens], np.int32)}
        return {config.TEXT_OUTPUT.name: _strings(text)}

    def _logprobs(self, token: Token) -> dict[int, Any]:
        """Return log-probabilities by token id, in vLLM's form. An unknown rank is None."""
        assert token.logprobs is not None
        ranks = {other: rank for rank, (other, _) in enumerate(token.logprobs.top, 1)}
        values = dict(token.logprobs.top) | {token.id: token.logprobs.logprob}
        return {
            other: {
                "logprob": finite(value),
                "rank": ranks.get(other),
                "decoded_token": self._texts.text(other),
            }
            for other, value in values.items()
        }


def _strings(text: str) -> np.ndarray:
    return np.array([text.encode()], dtype=object)


class ResponseSender:
    """Sends the responses of a request, from one thread. Triton crashes if an ended request is
    checked for cancellation."""

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb_utils, self._sender = pb_utils, request.get_response_sender()
        self._ended = False

    @property
    def cancelled(self) -> bool:
        return not self._ended and self._sender.is_cancelled()

    def send(self, arrays: Arrays, *, last: bool) -> None:
        tensors = [
            self._pb_utils.Tensor(name, np.ascontiguousarray(array))
            for name, array in arrays.items()
        ]
        self._send(self._pb_utils.InferenceResponse(output_tensors=tensors), last=last)

    def send_error(self, error: ApiError) -> None:
        codes = self._pb_utils.TritonError
        named = {
            400: codes.INVALID_ARG,
            404: codes.NOT_FOUND,
            429: codes.UNAVAILABLE,
            503: codes.UNAVAILABLE,
        }
        self._end(error.message, named.get(error.status, codes.INTERNAL))

    def end_cancelled(self) -> None:
        self._end("the client has cancelled the request", self._pb_utils.TritonError.CANCELLED)

    def _end(self, message: str, code: Any) -> None:
        if not self._ended:
            error = self._pb_utils.TritonError(message, code)
            self._send(self._pb_utils.InferenceResponse(error=error), last=True)

    def _send(self, response: Any, *, last: bool) -> None:
        self._ended = last
        self._sender.send(
            response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0
        )
