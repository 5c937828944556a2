"""The choices of an answer, and the JSON of completions and chats, whole or as events."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pass_runtime import Detokenizer, Generation, Piece, Token, Vocabulary
from pass_server.api_error import ApiError
from pass_server.request import Echo
from pass_server.turn_reader import (
    ContentDelta,
    ReasoningDelta,
    ReasoningReader,
    ToolCallStart,
    TurnDelta,
)
from pass_server.turns import TurnFormat

Json = dict[str, Any]
MIN_LOGPROB = -9999.0
"""The log-probability that stands for -inf, which JSON does not have."""
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


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
        """Return the deltas of the text that was held back. cut: whether it ended in the middle of
        a turn."""
        return [self._add(delta) for delta in self._reader.finish(cut=cut)]

    def message(self) -> Json:
        content = self.content or (None if self.calls else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def count_reasoning_tokens(self, tokens: Sequence[Token]) -> int:
        """Return how many of the turn's `tokens` are reasoning."""
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
            self.calls[-1]["function"]["arguments"] += delta.text
            call = {"function": {"arguments": delta.text}}
        return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}


@dataclass
class Choice:
    """One sequence of a request, and what its answer needs.

    arrived, first_written, last_written: when the request came, and when the sequence's first and
    last tokens were written, in seconds of `time.perf_counter`. echo: the prompt if the answer
    repeats it first. answer: collects a chat's message; None for plain text. offset_detokenizer:
    has read every token sent so far, for text offsets in logprobs; None before the first token."""

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
    def mean_logprob(self) -> float:
        """The mean log-probability of the tokens, or 0."""
        logprobs = [each.logprobs.logprob for each in self.generation.tokens if each.logprobs]
        return sum(logprobs) / len(logprobs) if logprobs else 0.0


class TokenTexts:
    """The text and the bytes of single tokens, which may be parts of a character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def bytes(self, token: int) -> bytes:
        special = self.vocabulary.special_text(token)
        return self.vocabulary.bytes(token) if special is None else special.encode()

    def text(self, token: int) -> str:
        """Return a token's text; a part of a character as `bytes:\\xe2\\x82`, as OpenAI does."""
        content = self.bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def pass_field(generation: Generation, *, details: bool = False) -> Json:
    """Return the field `pass`: how a choice was decoded. details: with acceptance by position."""
    stats = generation.stats
    names = ("plan", "passes", "tau", "drafted", "accepted")
    times = ("queue_seconds", "prefill_seconds", "decode_seconds")
    rates = ("acceptance_per_position",) if details else ()
    return {"seed": generation.seed, "stop_reason": generation.stop_reason} | {
        name: getattr(stats, name) for name in (*names, *times, *rates)
    }


def usage_field(prompt_tokens: int, per_prompt: int, choices: Sequence[Choice]) -> Json:
    """Return the field `usage`. per_prompt: how many of the choices belong to each prompt."""
    completion_tokens = sum(len(choice.generation.tokens) for choice in choices)
    cached = [choice.generation.stats.cached_tokens for choice in choices]
    # One choice of a prompt prefills it, and the others find it in the cache.
    cached_tokens = sum(min(cached[i : i + per_prompt]) for i in range(0, len(cached), per_prompt))
    reasoning_tokens = sum(
        choice.answer.count_reasoning_tokens(choice.generation.tokens)
        for choice in choices
        if choice.answer is not None
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def sse_event(content: Json, name: str = "") -> bytes:
    """Return a server-sent event. name: "" for an event without a name."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_JSON.encode(content)}\n\n".encode()


class ChoicesFormatter(ABC):
    """Writes the answer of a completion or a chat.

    A stream consists of an `event` for each object that `opening`, `piece` and `ending` return for
    a choice, then `closing`, or `failure` after an error, and at last `done`.

    logprobs: whether the request asks for log-probabilities. include_usage: whether a stream ends
    with `usage`. pass_details: whether the field `pass` has every token with its source."""

    done = b"data: [DONE]\n\n"
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
        contents = []
        for choice in choices:
            generation = choice.generation
            message = self._message(choice)  # first, since `_finish_reason` depends on its calls
            logprobs = self._logprobs_of(choice, generation.tokens)
            fields = self._choice_json(choice, message, logprobs, self._finish_reason(choice))
            details = {"tokens": _sources(generation.tokens)} if self._details else {}
            fields["pass"] = pass_field(generation, details=self._details) | details
            contents.append(fields)
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

    def _is_sent_without_text(self, piece: Piece) -> bool:
        return bool(piece.tokens) and (self._logprobs or self._details)

    def _details_of(self, choice: Choice, piece: Piece) -> Json:
        if not self._details or not piece.tokens:
            return {}
        seconds = piece.written - choice.arrived  # since the request came
        return {"pass": {"seconds": seconds, "tokens": _sources(piece.tokens)}}

    def _finish_reason(self, choice: Choice) -> str | None:
        return choice.generation.finish_reason

    def _logprobs_of(self, choice: Choice, tokens: Sequence[Token]) -> Json | None:
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


def _sources(tokens: Sequence[Token]) -> list[Json]:
    return [{"id": token.id, "text": token.text, "source": token.source} for token in tokens]


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
        if choice.echo is None:
            return []
        logprobs = self._logprobs_of(choice, ())
        return [self._choice_json(choice, {"text": choice.echo.text}, logprobs)]

    def _logprobs_json(self, choice: Choice, tokens: Sequence[Token]) -> Json:
        echo, generation = choice.echo, choice.generation
        all_tokens, offsets = [*tokens], list[int]()
        if choice.offset_detokenizer is None:
            choice.offset_detokenizer = Detokenizer(self._texts.vocabulary, generation.prompt_ids)
            if echo is not None:
                logprobs = generation.prompt_logprobs or ()
                prompt = zip(generation.prompt_ids, logprobs, strict=True)
                all_tokens = [*(Token(token, "model", each) for token, each in prompt), *tokens]
                offsets += echo.offsets
        for token in tokens:
            choice.offset_detokenizer.push(token.id)
            start = len(echo.text) if echo else 0
            offsets.append(start + choice.offset_detokenizer.token_start)
        return _logprob_columns(self._texts, all_tokens, offsets)


def _logprob_columns(
    texts: TokenTexts, tokens: Sequence[Token], offsets: Sequence[int]
) -> dict[str, list[Any]]:
    """Return `logprobs` of a completion. offsets: where each token's text begins in the answer,
    even if a stop string holds that text back or cuts it off."""
    logprobs, tops = list[float | None](), list[Json | None]()
    for token in tokens:
        if token.logprobs is None:  # the first token of a prompt
            logprobs.append(None)
            tops.append(None)
            continue
        top = Json()
        for other, value in token.logprobs.top:
            # Tokens may have the same text. The likeliest of them comes first, and is kept.
            top.setdefault(texts.text(other), finite(value))
        logprobs.append(finite(token.logprobs.logprob))
        tops.append(top)
    return {
        "tokens": [texts.text(token.id) for token in tokens],
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": [*offsets],
    }


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
        def entry(token: int, logprob: float) -> Json:
            content = list(self._texts.bytes(token))
            return {"token": self._texts.text(token), "logprob": finite(logprob), "bytes": content}

        entries = []
        for token in tokens:
            assert token.logprobs is not None
            top = [entry(other, value) for other, value in token.logprobs.top]
            entries.append(entry(token.id, token.logprobs.logprob) | {"top_logprobs": top})
        return {"content": entries, "refusal": None}
