"""The responses of one request: arrays by the names of output tensors, and how they are sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pass_runtime import Token
from pass_server.api_error import ApiError
from pass_server.choices import Choice, extension
from pass_server.formatters import TokenTexts, finite
from pass_server.triton.config import OUTPUT_IDS, TEXT_OUTPUT
from pass_server.triton.requests import ResponseOptions

Arrays = dict[str, np.ndarray]


class OutputTensors:
    """Makes the arrays of responses. tokens: whether the model writes token ids rather than text."""

    def __init__(self, texts: TokenTexts, *, tokens: bool) -> None:
        self._texts, self._tokens = texts, tokens

    def arrays(
        self, options: ResponseOptions, choice: Choice, tokens: Sequence[Token], text: str, *, last: bool
    ) -> Arrays:
        """The arrays of one response. tokens and text: those since the previous response. Counts are those of this
        response alone, as vLLM's are, so that the counts of a stream add up."""
        generation = choice.generation
        reason = str(generation.finish_reason) if last else "None"
        found = self._text(options.prefix + text, tokens) | {
            "finish_reason": _strings(reason),
            "num_input_tokens": np.array([len(generation.prompt_ids)], np.uint32),
            "num_output_tokens": np.array([len(tokens)], np.uint32),
        }
        if "return_cumulative_logprob" in options.returned:
            found["cumulative_logprob"] = np.array([_logprob(generation.tokens)], np.float32)
        if "return_logprobs" in options.returned:
            found["logprobs"] = _strings(json.dumps([self._logprobs(token) for token in tokens]))
        if last and "return_statistics" in options.returned:
            found["statistics"] = _strings(json.dumps(extension(generation)))
        always = (TEXT_OUTPUT.name, OUTPUT_IDS.name)
        return {name: array for name, array in found.items() if name in always or f"return_{name}" in options.returned}

    def _text(self, text: str, tokens: Sequence[Token]) -> Arrays:
        if self._tokens:
            return {OUTPUT_IDS.name: np.array([token.id for token in tokens], np.int32)}
        return {TEXT_OUTPUT.name: _strings(text)}

    def _logprobs(self, token: Token) -> dict[int, Any]:
        """In vLLM's shape: by token id, with the rank of a token that is among the most likely ones."""
        assert token.logprobs is not None
        ranks = {other: rank for rank, (other, _) in enumerate(token.logprobs.top, 1)}
        values = dict(token.logprobs.top) | {token.id: token.logprobs.logprob}
        return {
            other: {"logprob": finite(value), "rank": ranks.get(other), "decoded_token": self._texts.text(other)}
            for other, value in values.items()
        }


def _logprob(tokens: Sequence[Token]) -> float:
    return sum(token.logprobs.logprob for token in tokens if token.logprobs is not None)


def _strings(text: str) -> np.ndarray:
    return np.array([text.encode()], dtype=object)


class ResponseSender:
    """Sends the responses of one request to Triton, for one thread. After the last response it never touches Triton's
    sender again: the server crashes where an ended request is checked for cancellation."""

    def __init__(self, pb_utils: Any, request: Any) -> None:
        self._pb_utils, self._sender = pb_utils, request.get_response_sender()
        self._ended = False

    @property
    def cancelled(self) -> bool:
        """Whether the client has cancelled the request before its last response."""
        return not self._ended and self._sender.is_cancelled()

    def send(self, arrays: Arrays, *, last: bool) -> None:
        tensors = [self._pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in arrays.items()]
        self._send(self._pb_utils.InferenceResponse(output_tensors=tensors), last=last)

    def refuse(self, error: ApiError) -> None:
        codes = self._pb_utils.TritonError
        named = {400: codes.INVALID_ARG, 404: codes.NOT_FOUND, 429: codes.UNAVAILABLE, 503: codes.UNAVAILABLE}
        self._end(error.message, named.get(error.status, codes.INTERNAL))

    def end_cancelled(self) -> None:
        self._end("the client has cancelled the request", self._pb_utils.TritonError.CANCELLED)

    def _end(self, message: str, code: Any) -> None:
        if not self._ended:
            error = self._pb_utils.TritonError(message, code)
            self._send(self._pb_utils.InferenceResponse(error=error), last=True)

    def _send(self, response: Any, *, last: bool) -> None:
        self._ended = last
        self._sender.send(response, flags=self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)
