"""The message of one choice of a chat, put together while its text is written, and the deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pass_runtime.decode.sequence import Token
from pass_server.parts import Arguments, CallBegun, Part, Said, Thought
from pass_server.turns import Turn

Json = dict[str, Any]


class ChatAnswer:
    """content, thoughts and calls: what was written so far."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._reader = turn, turn.reader()
        self.content = self.thoughts = ""
        self.calls: list[Json] = []

    def push(self, tokens: Sequence[Token], text: str) -> list[Json]:
        """-> the deltas for `text`, which became final with `tokens`"""
        return [self._delta(part) for part in self._reader.push(self._turn.text(tokens, text))]

    def finish(self) -> list[Json]:
        """-> the deltas for what was held back, once no more text comes"""
        return [self._delta(part) for part in self._reader.finish()]

    def message(self) -> Json:
        """The whole message."""
        found: Json = {"role": "assistant", "content": self.content or (None if self.calls else ""), "refusal": None}
        if self.thoughts:
            found["reasoning_content"] = self.thoughts
        if self.calls:
            found["tool_calls"] = self.calls
        return found

    def thought_tokens(self, tokens: Sequence[Token]) -> int:
        """How many of the tokens of the whole text come before anything that is no thought."""
        if not self.thoughts:
            return 0
        reader = self._turn.reader()
        for count, token in enumerate(tokens):
            if any(not isinstance(part, Thought) for part in reader.push(self._turn.text([token], token.text))):
                return count
        return len(tokens)

    def _delta(self, part: Part) -> Json:
        if isinstance(part, Said):
            self.content += part.text
            return {"content": part.text}
        if isinstance(part, Thought):
            self.thoughts += part.text
            return {"reasoning_content": part.text}
        if isinstance(part, CallBegun):
            assert self._turn.calls is not None
            function = {"name": part.name, "arguments": ""}
            self.calls.append({"id": self._turn.calls.new_id(), "type": "function", "function": function})
            return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1], "function": {**function}}]}
        assert isinstance(part, Arguments)
        self.calls[-1]["function"]["arguments"] += part.text
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": part.text}}]}
