"""The JSON of answers: the shapes of /v1/completions and /v1/chat/completions, whole and as events
of a stream."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from pass_runtime import Detokenizer, Piece, Token, Vocabulary
from pass_server.api_error import ApiError
from pass_server.choices import Choice, Json, pass_field, tokens_with_sources


class TokenTexts:
    """The text and the bytes of single tokens. A token may be a part of a character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def bytes(self, token: int) -> bytes:
        """A token's bytes; a special token has those of its name."""
        special = self.vocabulary.special_text(token)
        return self.vocabulary.bytes(token) if special is None else special.encode()

    def text(self, token: int) -> str:
        """A token's text; a part of a character as OpenAI writes it, such as `bytes:\\xe2\\x82`."""
        found = self.bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[Token], before: Detokenizer
) -> dict[str, Any]:
    """The field `logprobs` for `tokens`. before: has read the tokens before these; reads these too.

    An offset is where a token's text begins, even if a stop string holds that text back or cuts it
    off.
    """
    found: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token in tokens:
        assert token.logprobs is not None
        found["tokens"].append(texts.text(token.id))
        found["token_logprobs"].append(finite(token.logprobs.logprob))
        top: dict[str, float] = {}
        for other, value in token.logprobs.top:
            # Of equal texts the first is the likeliest.
            top.setdefault(texts.text(other), finite(value))
        found["top_logprobs"].append(top)
        before.push(token.id)
        found["text_offset"].append(before.place)
    return found


def chat_logprobs(texts: TokenTexts, tokens: Sequence[Token]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token),
            "logprob": finite(logprob),
            "bytes": list(texts.bytes(token)),
        }

    content = []
    for token in tokens:
        assert token.logprobs is not None
        top = [entry(other, value) for other, value in token.logprobs.top]
        content.append(entry(token.id, token.logprobs.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def finite(logprob: float) -> float:
    """The value, or -9999 for -inf, which JSON does not have."""
    return max(logprob, -9999.0)


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def sse_event(content: Json, name: str = "") -> bytes:
    """A server-sent event. name: "" for an event without a name."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_JSON.encode(content)}\n\n".encode()


class ResponseFormatter(ABC):
    """Writes one request's answer. In a stream, each object that `opening`, `piece` and `ending`
    return for a choice is sent as an `event`; after all choices come `closing`, or `failure` if
    there was an error, and `done`."""

    done = b"data: [DONE]\n\n"

    @abstractmethod
    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        """The answer if it is not a stream."""

    @abstractmethod
    def opening(self, choice: Choice) -> list[Json]:
        """What a stream sends for a choice before its first piece."""

    @abstractmethod
    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        """What a stream sends for a piece; [] if the piece has nothing for the client."""

    @abstractmethod
    def ending(self, choice: Choice) -> list[Json]:
        """What a stream sends for a choice after its last piece."""

    @abstractmethod
    def event(self, shown: Json) -> bytes:
        """The event for an object that `opening`, `piece` or `ending` returned."""

    @abstractmethod
    def closing(self, choices: Sequence[Choice], usage: Json) -> bytes:
        """The events after all choices have ended."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The event that says why a stream ends early."""


class ChoicesFormatter(ResponseFormatter):
    """Writes answers with the field `choices`, those of completions and chats. logprobs: whether
    the request asks for them. include_usage: whether a stream ends with an event that has `usage`.
    pass_details: whether the field `pass` has every token with its source."""

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
        self.model, self._texts, self._logprobs, self._include_usage = (
            model,
            texts,
            logprobs,
            include_usage,
        )
        self._details = pass_details

    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        return self._envelope(self.object_type, [self._finished(choice) for choice in choices]) | {
            "usage": usage
        }

    def event(self, shown: Json) -> bytes:
        return sse_event(
            self._envelope(self.chunk_type, [shown])
            | ({"usage": None} if self._include_usage else {})
        )

    def closing(self, choices: Sequence[Choice], usage: Json) -> bytes:  # noqa: ARG002
        return (
            sse_event(self._envelope(self.chunk_type, []) | {"usage": usage})
            if self._include_usage
            else b""
        )

    def failure(self, error: ApiError) -> bytes:
        return sse_event(error.body)

    def opening(self, choice: Choice) -> list[Json]:  # noqa: ARG002
        return []

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        if not piece.text and not self._is_sent_without_text(piece):
            return []
        shown = self._choice_json(
            choice, self._delta(piece.text), self._logprobs_of(choice, piece.tokens), None
        )
        return [shown | self._details_of(choice, piece)]

    def ending(self, choice: Choice) -> list[Json]:
        ended = self._choice_json(choice, self._delta(""), None, self._finish_reason(choice))
        return [ended | {"pass": pass_field(choice.generation, details=self._details)}]

    def _finished(self, choice: Choice) -> Json:
        done = choice.generation
        message = self._message(choice)
        ended = self._choice_json(
            choice, message, self._logprobs_of(choice, done.tokens), self._finish_reason(choice)
        )
        tokens = {"tokens": tokens_with_sources(done.tokens)} if self._details else {}
        return ended | {"pass": pass_field(done, details=self._details) | tokens}

    def _is_sent_without_text(self, piece: Piece) -> bool:
        """Whether a piece is sent even if it has no text."""
        return bool(piece.tokens) and (self._logprobs or self._details)

    def _details_of(self, choice: Choice, piece: Piece) -> Json:
        """The field `pass` of the chunk of one pass, if the request wants it. seconds: since the
        request came."""
        if not self._details or not piece.tokens:
            return {}
        return {
            "pass": {
                "seconds": piece.written - choice.timing.arrived,
                "tokens": tokens_with_sources(piece.tokens),
            }
        }

    def _finish_reason(self, choice: Choice) -> str | None:
        return choice.generation.finish_reason

    def _logprobs_of(self, choice: Choice, tokens: Sequence[Token]) -> Json | None:
        """The logprobs of the next `tokens` of a choice; None if the request asks for none."""
        return self._logprobs_json(choice, tokens) if self._logprobs else None

    def _envelope(self, object_type: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": object_type,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    @staticmethod
    def _choice_json(
        choice: Choice, fields: Json, logprobs: Json | None, reason: str | None
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
        return {"text": choice.echo + choice.generation.text}

    def opening(self, choice: Choice) -> list[Json]:
        return [self._choice_json(choice, {"text": choice.echo}, None, None)] if choice.echo else []

    def _logprobs_json(self, choice: Choice, tokens: Sequence[Token]) -> Json:
        if choice.offset_detokenizer is None:
            choice.offset_detokenizer = Detokenizer(
                self._texts.vocabulary, choice.generation.prompt_ids
            )
        return completion_logprobs(self._texts, tokens, choice.offset_detokenizer)


class ChatFormatter(ChoicesFormatter):
    id_prefix, object_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> list[Json]:
        return [
            self._choice_json(choice, {"delta": {"role": "assistant", "content": ""}}, None, None)
        ]

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        if choice.answer is None:
            return super().piece(choice, piece)
        logprobs = self._logprobs_of(choice, piece.tokens)
        deltas = choice.answer.push(piece.text)
        if not deltas and self._is_sent_without_text(piece):
            deltas = [{}]
        shown = [self._choice_json(choice, {"delta": delta}, None, None) for delta in deltas]
        if shown:
            shown[0] |= {"logprobs": logprobs} | self._details_of(choice, piece)
        return shown

    def ending(self, choice: Choice) -> list[Json]:
        deltas = choice.finish_answer()
        return [
            self._choice_json(choice, {"delta": delta}, None, None) for delta in deltas
        ] + super().ending(choice)

    def _message(self, choice: Choice) -> Json:
        if choice.answer is not None:
            return {"message": choice.answer.message()}
        return {
            "message": {"role": "assistant", "content": choice.generation.text, "refusal": None}
        }

    def _finished(self, choice: Choice) -> Json:
        if choice.answer is not None:
            choice.answer.push(choice.generation.text)
            choice.finish_answer()
        return super()._finished(choice)

    def _finish_reason(self, choice: Choice) -> str | None:
        reason = choice.generation.finish_reason
        return (
            "tool_calls"
            if reason == "stop" and choice.answer is not None and choice.answer.calls
            else reason
        )

    def _logprobs_json(self, choice: Choice, tokens: Sequence[Token]) -> Json:  # noqa: ARG002
        return chat_logprobs(self._texts, tokens)
