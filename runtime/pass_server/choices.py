"""The choices of an answer, each with its sequence, and the message of a chat as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pass_runtime import Detokenizer, Generation, Token
from pass_server.turn_reader import (
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallStart,
    TurnDelta,
)
from pass_server.turns import TurnFormat

Json = dict[str, Any]


class ChatAnswer:
    """Collects the message of a chat's choice from its text. content, reasoning and calls: those of
    the text so far."""

    def __init__(self, turn_format: TurnFormat) -> None:
        self._format, self._reader = turn_format, turn_format.reader()
        self.content = self.reasoning = ""
        self.calls: list[Json] = []

    def push(self, text: str) -> list[Json]:
        """Read the next text, markers included. Returns its deltas in OpenAI's form."""
        return [self._delta(part) for part in self._reader.push(text)]

    def finish(self, *, cut: bool) -> list[Json]:
        """The deltas of the text that was held back. Call it after the last `push`. cut: whether
        the text ended in the middle of a turn, by its length or a stop string."""
        return [self._delta(part) for part in self._reader.finish(cut=cut)]

    def message(self) -> Json:
        """The whole message."""
        content = self.content or (None if self.calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def count_reasoning_tokens(self, tokens: Sequence[Token]) -> int:
        """The number of reasoning tokens: those before the first content or tool call. tokens: all
        tokens of the text."""
        if not self.reasoning:
            return 0
        reader = self._format.reader()
        for i, token in enumerate(tokens):
            if any(not isinstance(part, ReasoningDelta) for part in reader.push(token.text)):
                return i
        return len(tokens)

    def _delta(self, part: TurnDelta) -> Json:
        if isinstance(part, ContentDelta):
            self.content += part.text
            return {"content": part.text}
        if isinstance(part, ReasoningDelta):
            self.reasoning += part.text
            return {"reasoning_content": part.text}
        if isinstance(part, ToolCallStart):
            assert self._format.calls is not None
            function = {"name": part.name, "arguments": ""}
            call = {"id": self._format.calls.new_id(), "type": "function", "function": function}
            self.calls.append(call)
            call = call | {"function": dict(function)}
        else:
            assert isinstance(part, ArgumentsDelta)
            self.calls[-1]["function"]["arguments"] += part.text
            call = {"function": {"arguments": part.text}}
        return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}


@dataclass
class Choice:
    """One sequence of a request.

    arrived: when the request came; first_written, last_written: when the sequence's first and last
    tokens were written (None, 0: not yet); in seconds of `time.perf_counter`.
    echo: the prompt's text if the answer repeats it first (`echo` of the request), else "".
    answer: collects a chat's message; None for plain text.
    offset_detokenizer: computes the text offsets in logprobs. It has read every token sent so far;
    None until the first token is sent.
    """

    index: int
    generation: Generation
    arrived: float
    first_written: float | None = None
    last_written: float = 0.0
    echo: str = ""
    answer: ChatAnswer | None = None
    offset_detokenizer: Detokenizer | None = None

    def finish_answer(self) -> list[Json]:
        """The last deltas of a chat's message; [] for plain text."""
        if self.answer is None:
            return []
        stopped_by_string = isinstance(self.generation.stop_reason, str)
        return self.answer.finish(
            cut=stopped_by_string or self.generation.finish_reason == "length"
        )

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens; 0 if no token has a log-probability."""
        logprobs = [each.logprobs.logprob for each in self.generation.tokens if each.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else 0.0
