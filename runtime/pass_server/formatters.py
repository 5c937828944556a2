"""Writes answers as JSON, whole or as the events of a stream: the interface of such formatters, and
those of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from pass_runtime import Detokenizer, Generation, Piece, Token
from pass_server.api_error import ApiError
from pass_server.choices import Choice, Json
from pass_server.logprobs import (
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)


def pass_field(generation: Generation, *, details: bool = False) -> Json:
    """Return the field `pass`: how a choice was decoded. details: with acceptance by position."""
    stats = generation.stats
    names = ("plan", "passes", "tau", "drafted", "accepted")
    times = ("queue_seconds", "prefill_seconds", "decode_seconds")
    rates = ("acceptance_per_position",) if details else ()
    return {"seed": generation.seed, "stop_reason": generation.stop_reason} | {
        name: getattr(stats, name) for name in (*names, *times, *rates)
    }


def tokens_with_sources(tokens: Sequence[Token]) -> list[Json]:
    """Return the tokens as JSON. The source of a token is the kind of draft that it was, or the
    model. Texts of tokens may be empty; joined they are the text of the answer."""
    return [{"id": token.id, "text": token.text, "source": token.source} for token in tokens]


def usage_field(prompt_tokens: int, per_prompt: int, choices: Sequence[Choice]) -> Json:
    """Return the field `usage` of an answer. prompt_tokens: the sum over all prompts. per_prompt:
    how many of the choices belong to each prompt."""
    completion_tokens = sum(len(choice.generation.tokens) for choice in choices)
    cached = [choice.generation.stats.cached_tokens for choice in choices]
    # One choice of a prompt prefills it, and the others find its K/V in the cache. So the smallest
    # count is what was cached when the request came.
    cached_tokens = sum(min(cached[i : i + per_prompt]) for i in range(0, len(cached), per_prompt))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)
        },
    }


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def sse_event(content: Json, name: str = "") -> bytes:
    """Return a server-sent event. name: "" for an event without a name."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_JSON.encode(content)}\n\n".encode()


class ResponseFormatter(ABC):
    """Writes the answer of one request.

    A stream consists of an `event` for each object that `opening`, `piece` and `ending` return for
    a choice, then `closing`, or `failure` after an error, and at last `done`.
    """

    done = b"data: [DONE]\n\n"

    @abstractmethod
    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        """Return the answer that is not a stream."""

    @abstractmethod
    def opening(self, choice: Choice) -> list[Json]:
        """Return what a stream sends for a choice before its first piece."""

    @abstractmethod
    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        """Return what a stream sends for a piece; [] if there is nothing to send yet."""

    @abstractmethod
    def ending(self, choice: Choice) -> list[Json]:
        """Return what a stream sends for a choice after its last piece."""

    @abstractmethod
    def event(self, content: Json) -> bytes:
        """Return the event for an object that `opening`, `piece` or `ending` returned."""

    @abstractmethod
    def closing(self, choices: Sequence[Choice], usage: Json) -> bytes:
        """Return the events that follow once all choices have ended."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the event that says why a stream ends early."""


class ChoicesFormatter(ResponseFormatter):
    """Writes answers that have a field `choices`: those of completions and chats.

    texts: the texts of tokens. logprobs: whether the request asks for log-probabilities.
    include_usage: whether a stream ends with an event that has `usage`. pass_details: whether the
    field `pass` has every token with its source.
    """

    id_prefix: str
    object_type: str
    chunk_type: str

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        *,
        logprobs: bool,
        include_usage: bool = False,
        pass_details: bool = False,
    ) -> None:
        self.id, self.created = f"{self.id_prefix}-{uuid.uuid4().hex}", int(time.time())
        self.model, self._texts, self._logprobs = model, texts, logprobs
        self._include_usage, self._details = include_usage, pass_details

    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        contents = [self._whole_choice(choice) for choice in choices]
        return self._envelope(self.object_type, contents) | {"usage": usage}

    def event(self, content: Json) -> bytes:
        usage = {"usage": None} if self._include_usage else {}
        return sse_event(self._envelope(self.chunk_type, [content]) | usage)

    def closing(self, choices: Sequence[Choice], usage: Json) -> bytes:  # noqa: ARG002
        if not self._include_usage:
            return b""
        return sse_event(self._envelope(self.chunk_type, []) | {"usage": usage})

    def failure(self, error: ApiError) -> bytes:
        return sse_event(error.body)

    def opening(self, choice: Choice) -> list[Json]:  # noqa: ARG002
        return []

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        if not piece.text and not self._is_sent_without_text(piece):
            return []
        logprobs = self._logprobs_of(choice, piece.tokens)
        fields = self._choice_json(choice, self._delta(piece.text), logprobs)
        return [fields | self._details_of(choice, piece)]

    def ending(self, choice: Choice) -> list[Json]:
        fields = self._choice_json(choice, self._delta(""), None, self._finish_reason(choice))
        return [fields | {"pass": pass_field(choice.generation, details=self._details)}]

    def _whole_choice(self, choice: Choice) -> Json:
        generation = choice.generation
        message = self._message(choice)  # first, since `_finish_reason` depends on its tool calls
        logprobs = self._logprobs_of(choice, generation.tokens)
        fields = self._choice_json(choice, message, logprobs, self._finish_reason(choice))
        tokens = {"tokens": tokens_with_sources(generation.tokens)} if self._details else {}
        return fields | {"pass": pass_field(generation, details=self._details) | tokens}

    def _is_sent_without_text(self, piece: Piece) -> bool:
        return bool(piece.tokens) and (self._logprobs or self._details)

    def _details_of(self, choice: Choice, piece: Piece) -> Json:
        """Return the field `pass` of one pass if the request asks for it, else {}."""
        if not self._details or not piece.tokens:
            return {}
        seconds = piece.written - choice.arrived  # since the request came
        return {"pass": {"seconds": seconds, "tokens": tokens_with_sources(piece.tokens)}}

    def _finish_reason(self, choice: Choice) -> str | None:
        return choice.generation.finish_reason

    def _logprobs_of(self, choice: Choice, tokens: Sequence[Token]) -> Json | None:
        """Return `logprobs` of the next tokens of a choice; None if the request asks for none."""
        return self._logprobs_json(choice, tokens) if self._logprobs else None

    def _envelope(self, object_type: str, choices: list[Json]) -> Json:
        head = {"id": self.id, "object": object_type, "created": self.created, "model": self.model}
        return {**head, "choices": choices}

    @staticmethod
    def _choice_json(
        choice: Choice, fields: Json, logprobs: Json | None = None, reason: str | None = None
    ) -> Json:
        return {"index": choice.index, **fields, "logprobs": logprobs, "finish_reason": reason}

    @abstractmethod
    def _delta(self, text: str) -> Json: ...  # the fields of a chunk's choice for `text`
    @abstractmethod
    def _message(self, choice: Choice) -> Json: ...  # the fields of a whole choice for its text
    @abstractmethod
    def _logprobs_json(self, choice: Choice, tokens: Sequence[Token]) -> Json: ...


class CompletionFormatter(ChoicesFormatter):
    id_prefix, object_type, chunk_type = "cmpl", "text_completion", "text_completion"

    def _delta(self, text: str) -> Json:
        return {"text": text}

    def _message(self, choice: Choice) -> Json:
        return {"text": (choice.echo.text if choice.echo else "") + choice.generation.text}

    def opening(self, choice: Choice) -> list[Json]:
        # Log-probabilities of the prompt are known when the first piece is.
        return [] if self._logprobs else self._echo(choice)

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        return self._late_echo(choice) + super().piece(choice, piece)

    def ending(self, choice: Choice) -> list[Json]:
        return self._late_echo(choice) + super().ending(choice)

    def _late_echo(self, choice: Choice) -> list[Json]:
        is_first = self._logprobs and choice.offset_detokenizer is None
        return self._echo(choice) if is_first else []

    def _echo(self, choice: Choice) -> list[Json]:
        """Return the chunk that repeats the prompt, if the request asks for it."""
        if choice.echo is None:
            return []
        logprobs = self._logprobs_of(choice, ())
        return [self._choice_json(choice, {"text": choice.echo.text}, logprobs)]

    def _logprobs_json(self, choice: Choice, tokens: Sequence[Token]) -> Json:
        texts, echo, generation = self._texts, choice.echo, choice.generation
        before: Json = {}
        if choice.offset_detokenizer is None:
            choice.offset_detokenizer = Detokenizer(texts.vocabulary, generation.prompt_ids)
            if echo is not None:
                before = prompt_logprobs(texts, generation, echo.offsets)
        start = len(echo.text) if echo else 0
        columns = completion_logprobs(texts, tokens, choice.offset_detokenizer, start)
        return {name: before.get(name, []) + values for name, values in columns.items()}


class ChatFormatter(ChoicesFormatter):
    id_prefix, object_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> list[Json]:
        return [self._choice_json(choice, {"delta": {"role": "assistant", "content": ""}})]

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        if choice.answer is None:
            return super().piece(choice, piece)
        logprobs = self._logprobs_of(choice, piece.tokens)
        deltas = choice.answer.push(piece.text)
        if not deltas and self._is_sent_without_text(piece):
            deltas = [{}]  # to send log-probabilities and details
        contents = self._delta_choices(choice, deltas)
        if contents:  # The first gets the log-probabilities and details of the whole piece.
            contents[0] |= {"logprobs": logprobs} | self._details_of(choice, piece)
        return contents

    def ending(self, choice: Choice) -> list[Json]:
        return self._delta_choices(choice, choice.finish_answer()) + super().ending(choice)

    def _delta_choices(self, choice: Choice, deltas: list[Json]) -> list[Json]:
        return [self._choice_json(choice, {"delta": delta}) for delta in deltas]

    def _message(self, choice: Choice) -> Json:
        text, answer = choice.generation.text, choice.answer
        if answer is None:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        answer.push(text)
        choice.finish_answer()
        return {"message": answer.message()}

    def _finish_reason(self, choice: Choice) -> str | None:
        reason, answer = choice.generation.finish_reason, choice.answer
        return "tool_calls" if reason == "stop" and answer and answer.calls else reason

    def _logprobs_json(self, choice: Choice, tokens: Sequence[Token]) -> Json:  # noqa: ARG002
        return chat_logprobs(self._texts, tokens)
