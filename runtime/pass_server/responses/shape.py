"""The JSON of the answers of /v1/responses, whole and as the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence

from pass_runtime.decode.sequence import Piece, Token
from pass_server.answer_shape import AnswerShape, sent
from pass_server.choices import Choice, Json, extension
from pass_server.errors import ApiError
from pass_server.responses.output import Output


class ResponsesShape(AnswerShape):
    """The shape of one request's answer, which has one choice. echo: what it repeats of the request."""

    done = b""

    def __init__(self, model: str, echo: Json) -> None:
        self.id, self._created, self._model, self._echo = f"resp_{uuid.uuid4().hex}", int(time.time()), model, echo
        self._output = Output()
        self._count = 0  # of the events so far

    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        (choice,) = choices
        self._read(choice, choice.generation.tokens, choice.generation.text)
        self.ending(choice)
        return self._ended(choice, usage)

    def opening(self, choice: Choice) -> list[Json]:  # noqa: ARG002 - there is one
        begun = self._response("in_progress")
        return [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        return self._read(choice, piece.tokens, piece.text)

    def ending(self, choice: Choice) -> list[Json]:
        """What was held back, and the end of the last item. An answer without anything is a message without text."""
        deltas = [] if choice.answer is None else choice.answer.finish()
        events = [event for delta in deltas for event in self._output.add(delta)]
        if not self._output.items:
            events += self._output.begin_message()
        return events + self._output.end(_status(choice))

    def event(self, shown: Json) -> bytes:
        self._count += 1
        return sent(shown | {"sequence_number": self._count - 1}, shown["type"])

    def closing(self, choices: Sequence[Choice], usage: Json) -> bytes:
        ended = self._ended(choices[0], usage)
        return self.event({"type": f"response.{ended['status']}", "response": ended})

    def failure(self, error: ApiError) -> bytes:
        self._output.end("incomplete")
        problem = {"code": "server_error", "message": error.message}
        return self.event({"type": "response.failed", "response": self._response("failed") | {"error": problem}})

    def _read(self, choice: Choice, tokens: Sequence[Token], text: str) -> list[Json]:
        deltas = [{"content": text}] if choice.answer is None else choice.answer.push(tokens, text)
        return [event for delta in deltas for event in self._output.add(delta)]

    def _ended(self, choice: Choice, usage: Json) -> Json:
        status = _status(choice)
        thoughts = 0 if choice.answer is None else choice.answer.thought_tokens(choice.generation.tokens)
        return self._response(status) | {
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": _usage(usage, thoughts),
            "pass": extension(choice.generation),
        }

    def _response(self, status: str) -> Json:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": self._output.copied(),
            **self._echo,
            "background": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "truncation": "disabled",
            "usage": None,
        }


def _status(choice: Choice) -> str:
    return "incomplete" if choice.generation.finish_reason == "length" else "completed"


def _usage(usage: Json, thoughts: int) -> Json:
    """thoughts: how many tokens of the output are reasoning."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": usage["total_tokens"],
    }
