"""The choices of an answer: each is a sequence and, in a chat, the message that grows with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pass_runtime import Detokenizer, Generation, Token
from pass_server.completions import Echo
from pass_server.turn_reader import (
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ReasoningReader,
    ToolCallStart,
    TurnDelta,
)
from pass_server.turns import TurnFormat

Json = dict[str, Any]


class ChatAnswer:
    """Collects the message of a chat's choice. content, reasoning, calls: those so far."""

    def __init__(self, turn_format: TurnFormat) -> None:
        self._format, self._reader = turn_format, turn_format.reader()
        self.content = self.reasoning = ""
        self.calls: list[Json] = []

    def push(self, text: str) -> list[Json]:
        """Read the next text, markers included. Return its deltas in OpenAI's form."""
        return [self._add(delta) for delta in self._reader.push(text)]

    def finish(self, *, cut: bool) -> list[Json]:
        """Return the deltas of the text that was held back. Call it after the last `push`. cut:
        whether the text ended in the middle of a turn, by its length or a stop string."""
        return [self._add(delta) for delta in self._reader.finish(cut=cut)]

    def message(self) -> Json:
        """Return the whole message."""
        content = self.content or (None if self.calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def count_reasoning_tokens(self, tokens: Sequence[Token]) -> int:
        """Return how many of the turn's `tokens` are reasoning, before any content or call."""
        if not self._format.has_reasoning:
            return 0
        reader = ReasoningReader(in_reasoning=self._format.in_reasoning)
        has_reasoning = False
        for i, token in enumerate(tokens):
            for delta in reader.push(token.text):
                if isinstance(delta, ContentDelta):
                    return i if has_reasoning else 0
                has_reasoning = True
        left = reader.finish(cut=True)
        has_reasoning |= any(isinstance(delta, ReasoningDelta) for delta in left)
        return len(tokens) if has_reasoning else 0

    def _add(self, delta: TurnDelta) -> Json:
        """Add a delta to the message, and return it in OpenAI's form."""
        if isinstance(delta, ContentDelta):
            self.content += delta.text
            return {"content": delta.text}
        if isinstance(delta, ReasoningDelta):
            self.reasoning += delta.text
            return {"reasoning_content": delta.text}
        if isinstance(delta, ToolCallStart):
            assert self._format.calls is not None
            function = {"name": delta.name, "arguments": ""}
            call = {"id": self._format.calls.new_id(), "type": "function", "function": function}
            self.calls.append(call)
            call = call | {"function": dict(function)}  # a copy, since the arguments still grow
        else:
            assert isinstance(delta, ArgumentsDelta)
            self.calls[-1]["function"]["arguments"] += delta.text
            call = {"function": {"arguments": delta.text}}
        return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}


@dataclass
class Choice:
    """One sequence of a request, and what its answer needs.

    arrived: when the request came. first_written, last_written: when the sequence's first and last
    tokens were written; None and 0 before that. All three are seconds of `time.perf_counter`. echo:
    the prompt if the answer repeats it first (`echo` of the request), else None. answer:
    collects a chat's message; None for plain text. offset_detokenizer: computes the text offsets in
    logprobs. It has read every token sent so far; None until the first token is sent.
    """

    index: int
    generation: Generation
    arrived: float
    first_written: float | None = None
    last_written: float = 0.0
    echo: Echo | None = None
    answer: ChatAnswer | None = None
    offset_detokenizer: Detokenizer | None = None

    def finish_answer(self) -> list[Json]:
        """Return the last deltas of a chat's message; [] for plain text."""
        if self.answer is None:
            return []
        at_stop_string = isinstance(self.generation.stop_reason, str)
        return self.answer.finish(cut=at_stop_string or self.generation.finish_reason == "length")

    @property
    def reasoning_tokens(self) -> int:
        """How many of the tokens are reasoning."""
        tokens = self.generation.tokens
        return 0 if self.answer is None else self.answer.count_reasoning_tokens(tokens)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens; 0 if no token has a log-probability."""
        logprobs = [each.logprobs.logprob for each in self.generation.tokens if each.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else 0.0
