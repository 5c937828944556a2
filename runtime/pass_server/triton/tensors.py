"""Reads the fields of a completion from Triton's input tensors, and makes output tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from pass_runtime import REQUEST_FIELDS, Token
from pass_server.api_error import ApiError, validation_error
from pass_server.choices import Choice
from pass_server.fields import null_or
from pass_server.formatters import pass_field
from pass_server.logprobs import TokenTexts, finite
from pass_server.schemas import CompletionRequest
from pass_server.triton.config import (
    EXCLUDE_INPUT,
    INPUT_IDS,
    OUTPUT_IDS,
    RESPONSE_FLAGS,
    SAMPLING_INPUTS,
    SAMPLING_PARAMETERS,
    TEXT_INPUT,
    TEXT_OUTPUT,
)

HTTP_NAMES = {field.triton: field.http for field in REQUEST_FIELDS if field.triton and field.http}
"""Fields of a completion by the names of their inputs. Other inputs have their field's name."""
Tensors = Mapping[str, np.ndarray]
"""The tensors of a request, by name."""


class TritonRequest(CompletionRequest):
    """A completion of one sequence. The fields below are not supported."""

    n: Any = null_or(1)
    best_of: Any = null_or(1)
    echo: Any = null_or(False)
    pass_details: Any = null_or(False)
    guided_decoding: Any = null_or()
    lora_name: Any = null_or()


@dataclass(frozen=True)
class ResponseOptions:
    """What responses contain. stream: whether there is one for every pass. returned: the inputs
    `return_...` that are true. prefix: the prompt's text if the output repeats it, else ""."""

    stream: bool
    returned: frozenset[str]
    prefix: str = ""


def read_request(
    model: str, tensors: Tensors, parameters: str
) -> tuple[TritonRequest, ResponseOptions]:
    """Return the completion that a request asks for, and what its responses contain. Raises
    ApiError if a value is invalid or contradicts another value.

    parameters: JSON of the request's parameters in Triton. The client may put there what the input
    `sampling_parameters` may hold.
    """
    inputs = {
        HTTP_NAMES.get(each.name, each.name): _value(tensors, each.name, each.dims)
        for each in SAMPLING_INPUTS
    }
    fields = {name: value for name, value in inputs.items() if value is not None}
    flags = {field.name: bool(_value(tensors, field.name)) for field in RESPONSE_FLAGS}
    for text in (_value(tensors, SAMPLING_PARAMETERS.name), _client_parameters(parameters)):
        _merge(fields, {} if text is None else _json_object(text))
    logprobs = flags["return_logprobs"] or flags["return_cumulative_logprob"]
    _rename_chat_logprobs(fields, logprobs=logprobs)
    text = _value(tensors, TEXT_INPUT.name)
    prompt = text if text is not None else _value(tensors, INPUT_IDS.name, -1)
    if prompt is None:
        raise ApiError("the request has no prompt", param=TEXT_INPUT.name)
    try:
        request = TritonRequest(model=model, prompt=prompt, **fields)
    except ValidationError as error:
        raise validation_error(error) from None
    return request, _response_options(flags, tensors, text)


def _response_options(flags: dict[str, bool], tensors: Tensors, text: Any) -> ResponseOptions:
    """Return what responses contain. flags: the values of RESPONSE_FLAGS. text: the text prompt."""
    stream = flags.pop("stream")
    prefix = text if _value(tensors, EXCLUDE_INPUT.name) is False else ""
    if prefix and stream:
        raise ApiError(f"{EXCLUDE_INPUT.name} must be true in a stream", param=EXCLUDE_INPUT.name)
    return ResponseOptions(stream, frozenset(name for name in flags if flags[name]), prefix)


def _value(tensors: Tensors, name: str, dims: int = 1) -> Any:
    """Return a tensor as Python values; None if the request has no tensor of that name."""
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


def _client_parameters(parameters: str) -> str | None:
    """Return the client's parameters, without those that Triton adds; None if there are none."""
    values = _json_object(parameters) if parameters else {}
    clients = {name: value for name, value in values.items() if not name.startswith("triton_")}
    return json.dumps(clients) if clients else None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        name = SAMPLING_PARAMETERS.name
        raise ApiError(f"{name} is not a JSON object", param=name)
    return value


def _merge(fields: dict[str, Any], parameters: dict[str, Any]) -> None:
    """Add parameters to `fields`. Raises ApiError if `fields` has another value for one of them, or
    one is no sampling parameter."""
    for name, value in parameters.items():
        if name in fields and fields[name] != value:
            raise ApiError(f"{name} is given twice with different values", param=name)
        if name in ("model", "prompt", "stream", "stream_options"):
            raise ApiError(f"{name} is not a sampling parameter", param=name)
        fields[name] = value


def _rename_chat_logprobs(fields: dict[str, Any], *, logprobs: bool) -> None:
    """Replace a chat's fields `logprobs` (bool) and `top_logprobs`, which Triton's OpenAI frontend
    sends, by a completion's `logprobs` (int). logprobs: whether the response needs any."""
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
    """Makes the output arrays of responses. tokens: whether they have token ids and not text."""

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
        """Return the arrays of one response. tokens, text: those since the previous response. As in
        vLLM, `num_output_tokens` counts these alone, so that the counts of a stream add up."""
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
        always = (TEXT_OUTPUT.name, OUTPUT_IDS.name)
        return {
            name: array
            for name, array in arrays.items()
            if name in always or f"return_{name}" in options.returned
        }

    def _text(self, text: str, tokens: Sequence[Token]) -> Arrays:
        if self._tokens:
            return {OUTPUT_IDS.name: np.array([token.id for token in tokens], np.int32)}
        return {TEXT_OUTPUT.name: _strings(text)}

    def _logprobs(self, token: Token) -> dict[int, Any]:
        """Return the log-probabilities of the token and of the likeliest ones in vLLM's form, by
        token id. The rank is 1 for the likeliest token, and None if it is not known."""
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
    """Sends the responses of one request to Triton; one thread calls all methods. Triton crashes if
    an ended request is checked for cancellation, so after the last response nothing is called."""

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb_utils, self._sender = pb_utils, request.get_response_sender()
        self._ended = False

    @property
    def cancelled(self) -> bool:
        """Whether the client has cancelled the request before its last response."""
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
