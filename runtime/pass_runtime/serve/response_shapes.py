"""The JSON of answers: the shapes of /v1/completions and /v1/chat/completions, whole and as events of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pass_runtime.decode.sequence import Piece, Token
from pass_runtime.generation import Generation
from pass_runtime.serve.chat_answer import ChatAnswer
from pass_runtime.serve.metrics import Timing
from pass_runtime.serve.tokens import TokenTexts, chat_logprobs, completion_logprobs

Json = dict[str, Any]


@dataclass
class Choice:
    """One sequence of a request. offset: how many characters of its text were sent. echo: what its text begins with.
    answer: puts the message of a chat together where it is more than text."""

    index: int
    generation: Generation
    timing: Timing
    offset: int = 0
    echo: str = ""
    answer: ChatAnswer | None = None

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens, where there are log-probabilities."""
        values = [token.logprobs.logprob for token in self.generation.tokens if token.logprobs is not None]
        return sum(values) / len(values) if values else 0.0


class ResponseShape(ABC):
    """The shape of one request's answer. logprobs: whether the request wants them."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: str, texts: TokenTexts, *, logprobs: bool) -> None:
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.model, self._texts, self._logprobs = model, texts, logprobs

    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        return self._envelope(self.kind, [self._finished(choice) for choice in choices]) | {"usage": usage}

    def chunk(self, choices: list[Json]) -> Json:
        """The content of one event of a stream."""
        return self._envelope(self.chunk_kind, choices)

    def opening(self, _: Choice) -> list[Json]:
        """What a stream sends for a choice before its first piece."""
        return []

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        """What a stream sends for a piece: a choice, or nothing where the piece has nothing to show."""
        if not piece.text and not (self._logprobs and piece.tokens):
            return []
        shown = self._choice(choice, self._delta(piece.text), self._logprobs_of(piece.tokens, choice.offset), None)
        choice.offset += len(piece.text)
        return [shown]

    def ending(self, choice: Choice) -> list[Json]:
        """What a stream sends for a choice after its last piece."""
        ended = self._choice(choice, self._delta(""), None, self._reason(choice))
        return [ended | {"pass": extension(choice.generation)}]

    def _finished(self, choice: Choice) -> Json:
        done = choice.generation
        message = self._message(choice)
        ended = self._choice(choice, message, self._logprobs_of(done.tokens, 0), self._reason(choice))
        return ended | {"pass": extension(done)}

    def _reason(self, choice: Choice) -> str | None:
        return choice.generation.finish_reason

    def _logprobs_of(self, tokens: Sequence[Token], offset: int) -> Json | None:
        return self._logprobs_json(tokens, offset) if self._logprobs else None

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    @staticmethod
    def _choice(choice: Choice, text: Json, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": choice.index, **text, "logprobs": logprobs, "finish_reason": reason}

    @abstractmethod
    def _delta(self, text: str) -> Json: ...
    @abstractmethod
    def _message(self, choice: Choice) -> Json: ...
    @abstractmethod
    def _logprobs_json(self, tokens: Sequence[Token], offset: int) -> Json: ...


class CompletionShape(ResponseShape):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _delta(self, text: str) -> Json:
        return {"text": text}

    def _message(self, choice: Choice) -> Json:
        return {"text": choice.echo + choice.generation.text}

    def opening(self, choice: Choice) -> list[Json]:
        return [self._choice(choice, {"text": choice.echo}, None, None)] if choice.echo else []

    def _logprobs_json(self, tokens: Sequence[Token], offset: int) -> Json:
        return completion_logprobs(self._texts, tokens, offset)


class ChatShape(ResponseShape):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> list[Json]:
        return [self._choice(choice, {"delta": {"role": "assistant", "content": ""}}, None, None)]

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        if choice.answer is None:
            return super().piece(choice, piece)
        logprobs = self._logprobs_of(piece.tokens, 0)
        deltas = choice.answer.push(piece.tokens, piece.text)
        if not deltas and logprobs is not None and piece.tokens:
            deltas = [{}]
        return [
            self._choice(choice, {"delta": delta}, None if place else logprobs, None)
            for place, delta in enumerate(deltas)
        ]

    def ending(self, choice: Choice) -> list[Json]:
        deltas = [] if choice.answer is None else choice.answer.finish()
        return [self._choice(choice, {"delta": delta}, None, None) for delta in deltas] + super().ending(choice)

    def _message(self, choice: Choice) -> Json:
        if choice.answer is not None:
            return {"message": choice.answer.message()}
        return {"message": {"role": "assistant", "content": choice.generation.text, "refusal": None}}

    def _finished(self, choice: Choice) -> Json:
        if choice.answer is not None:
            choice.answer.push(choice.generation.tokens, choice.generation.text)
            choice.answer.finish()
        return super()._finished(choice)

    def _reason(self, choice: Choice) -> str | None:
        reason = choice.generation.finish_reason
        return "tool_calls" if reason == "stop" and choice.answer is not None and choice.answer.calls else reason

    def _logprobs_json(self, tokens: Sequence[Token], offset: int) -> Json:  # noqa: ARG002 - the other shape's
        return chat_logprobs(self._texts, tokens)


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
