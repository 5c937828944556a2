"""The choices of a request, the message of a chat as it grows, and the field `pass` of an
answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pass_runtime import Detokenizer, Generation, Token
from pass_server.metrics import Timing
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
    """Collects the message of a chat's choice. content, reasoning and calls: what came so far."""

    def __init__(self, turn_format: TurnFormat) -> None:
        self._format, self._reader = turn_format, turn_format.reader()
        self.content = self.reasoning = ""
        self.calls: list[Json] = []

    def push(self, text: str) -> list[Json]:
        """The deltas for the next text, markers included."""
        return [self._delta(part) for part in self._reader.push(text)]

    def finish(self, *, cut: bool) -> list[Json]:
        """The deltas for what was held back, once no more text comes. cut: whether the text was cut
        off."""
        return [self._delta(part) for part in self._reader.finish(cut=cut)]

    def message(self) -> Json:
        """The whole message."""
        found: Json = {
            "role": "assistant",
            "content": self.content or (None if self.calls else ""),
            "refusal": None,
        }
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = self.calls
        return found

    def count_reasoning_tokens(self, tokens: Sequence[Token]) -> int:
        """How many of `tokens`, all tokens of the text, are reasoning: those before the first
        content or call."""
        if not self.reasoning:
            return 0
        reader = self._format.reader()
        for count, token in enumerate(tokens):
            if any(not isinstance(part, ReasoningDelta) for part in reader.push(token.text)):
                return count
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
            self.calls.append(
                {"id": self._format.calls.new_id(), "type": "function", "function": function}
            )
            return {
                "tool_calls": [
                    {"index": len(self.calls) - 1, **self.calls[-1], "function": {**function}}
                ]
            }
        assert isinstance(part, ArgumentsDelta)
        self.calls[-1]["function"]["arguments"] += part.text
        return {
            "tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": part.text}}]
        }


@dataclass
class Choice:
    """One sequence of a request. offset_detokenizer: for the text offsets of logprobs; has read the
    tokens sent so far, None before the first. echo: what its text begins with. answer: collects a
    chat's message; None for plain text."""

    index: int
    generation: Generation
    timing: Timing
    offset_detokenizer: Detokenizer | None = None
    echo: str = ""
    answer: ChatAnswer | None = None

    def finish_answer(self) -> list[Json]:
        """The last deltas of a chat's message; [] for plain text."""
        generation = self.generation
        # A stop string.
        cut = generation.finish_reason == "length" or isinstance(generation.stop_reason, str)
        return [] if self.answer is None else self.answer.finish(cut=cut)

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens; 0 if they have none."""
        values = [
            token.logprobs.logprob for token in self.generation.tokens if token.logprobs is not None
        ]
        return sum(values) / len(values) if values else 0.0


def pass_field(generation: Generation, *, details: bool = False) -> Json:
    """The field `pass` of a choice: how it was decoded. details: whether the request has
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


def tokens_with_sources(tokens: Sequence[Token]) -> list[Json]:
    """Tokens with their sources. Their texts, of which some may be empty, add up to the text."""
    return [{"id": token.id, "text": token.text, "source": token.source} for token in tokens]


def best_choices(choices: Sequence[Choice], per_prompt: int, n: int) -> list[Choice]:
    """The `n` likeliest of the `per_prompt` choices of each prompt, the best first, with new
    indices."""
    if per_prompt == n:
        return list(choices)
    groups = [choices[i : i + per_prompt] for i in range(0, len(choices), per_prompt)]
    kept = [each for group in groups for each in sorted(group, key=lambda c: -c.likelihood)[:n]]
    return [replace(choice, index=i) for i, choice in enumerate(kept)]


def usage(prompt_tokens: int, per_prompt: int, choices: Sequence[Choice]) -> Json:
    """OpenAI's `usage`. prompt_tokens: the sum over the prompts. per_prompt: how many choices each
    prompt has."""
    completion_tokens = sum(len(choice.generation.tokens) for choice in choices)
    hits = [choice.generation.stats.cached_tokens for choice in choices]
    # The choice that prefilled a prompt has the fewest cached tokens; the others of the prompt
    # share its K/V.
    cached = sum(min(hits[i : i + per_prompt]) for i in range(0, len(hits), per_prompt))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
