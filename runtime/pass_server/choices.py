"""The choices of a request while its answer is put together, and what an answer says about how they were decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pass_runtime import Detokenizer, Generation, Token
from pass_server.metrics import Timing
from pass_server.turn_reader import ArgumentsDelta, ContentDelta, ReasoningDelta, ToolCallStart, TurnDelta
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
            if any(not isinstance(part, ReasoningDelta) for part in reader.push(self._turn.text([token], token.text))):
                return count
        return len(tokens)

    def _delta(self, part: TurnDelta) -> Json:
        if isinstance(part, ContentDelta):
            self.content += part.text
            return {"content": part.text}
        if isinstance(part, ReasoningDelta):
            self.thoughts += part.text
            return {"reasoning_content": part.text}
        if isinstance(part, ToolCallStart):
            assert self._turn.calls is not None
            function = {"name": part.name, "arguments": ""}
            self.calls.append({"id": self._turn.calls.new_id(), "type": "function", "function": function})
            return {"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1], "function": {**function}}]}
        assert isinstance(part, ArgumentsDelta)
        self.calls[-1]["function"]["arguments"] += part.text
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": part.text}}]}


@dataclass
class Choice:
    """One sequence of a request. offsets: has read the tokens whose places in the text were reported, None before them.
    echo: what its text begins with. answer: puts the message of a chat together if it is more than text."""

    index: int
    generation: Generation
    timing: Timing
    offsets: Detokenizer | None = None
    echo: str = ""
    answer: ChatAnswer | None = None

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens, where there are log-probabilities."""
        values = [token.logprobs.logprob for token in self.generation.tokens if token.logprobs is not None]
        return sum(values) / len(values) if values else 0.0


def extension(generation: Generation, *, details: bool = False) -> Json:
    """The field `pass` of a choice, which says how it was decoded. details: also what requests ask for by
    `pass_details`."""
    stats = generation.stats
    more = {"acceptance_per_position": stats.acceptance_per_position} if details else {}
    return {
        "seed": generation.seed,
        "stop_reason": generation.stop_reason,
        "plan": stats.plan,
        "passes": stats.passes,
        "tau": stats.tau,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "queue_seconds": stats.queue_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        **more,
    }


def told(tokens: Sequence[Token]) -> list[Json]:
    """Tokens with their sources. Their texts, of which some may be empty, make up the text."""
    return [{"id": token.id, "text": token.text, "source": token.source} for token in tokens]


def best(choices: Sequence[Choice], written: int, n: int) -> list[Choice]:
    """Of every `written` choices in turn the `n` likeliest, the best first, numbered anew."""
    if written == n:
        return list(choices)
    groups = [choices[i : i + written] for i in range(0, len(choices), written)]
    kept = [each for group in groups for each in sorted(group, key=lambda c: -c.likelihood)[:n]]
    return [replace(choice, index=i) for i, choice in enumerate(kept)]


def usage(prompt_tokens: int, n: int, choices: Sequence[Choice]) -> Json:
    """prompt_tokens: the sum over the prompts, each of which has n of the choices. A text's last token is counted."""
    written = sum(len(choice.generation.tokens) for choice in choices)
    kept = [choice.generation.stats.cached_tokens for choice in choices]
    # Of the choices of a prompt, the one that read it found the least of it in the cache.
    cached = sum(min(kept[i : i + n]) for i in range(0, len(kept), n))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
