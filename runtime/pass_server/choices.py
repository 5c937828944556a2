"""The sequences of a request while its answer is put together, and what an answer says about how they were decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pass_runtime.generation import Generation
from pass_runtime.text.detokenizer import Detokenizer
from pass_server.chat_answer import ChatAnswer
from pass_server.metrics import Timing

Json = dict[str, Any]


@dataclass
class Choice:
    """One sequence of a request. offsets: has read the tokens whose places in the text were reported, None before them.
    echo: what its text begins with. answer: puts the message of a chat together where it is more than text."""

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


def extension(generation: Generation) -> Json:
    """The field `pass` of a choice, which says how it was decoded."""
    stats = generation.stats
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
    }


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
