"""The content of responses: arrays by the names of output tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pass_runtime.decode.sequence import Token
from pass_server.choices import Choice, extension
from pass_server.tokens import TokenTexts, finite
from pass_server.triton.fields import OUTPUT_IDS, TEXT_OUTPUT
from pass_server.triton.reading import ResponseOptions

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
