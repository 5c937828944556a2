"""What the answers of all endpoints have in common: they are sent whole, or as the server-sent events of a stream."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from pass_runtime.decode.sequence import Piece
from pass_server.choices import Choice, Json
from pass_server.errors import ApiError

_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def sent(content: Json, kind: str = "") -> bytes:
    """A server-sent event. kind: its name, where it has one."""
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {_JSON.encode(content)}\n\n".encode()


class AnswerShape(ABC):
    """The shape of one request's answer. A stream is what `opening`, `piece` and `ending` show of each choice, an
    `event` each, then `closing` or `failure`, then `done`."""

    done = b"data: [DONE]\n\n"

    @abstractmethod
    def whole(self, choices: Iterable[Choice], usage: Json) -> Json:
        """The answer that is not a stream."""

    @abstractmethod
    def opening(self, choice: Choice) -> list[Json]:
        """What a stream shows of a choice before its first piece."""

    @abstractmethod
    def piece(self, choice: Choice, piece: Piece) -> list[Json]:
        """What a stream shows of a piece; nothing where the piece has nothing to show."""

    @abstractmethod
    def ending(self, choice: Choice) -> list[Json]:
        """What a stream shows of a choice after its last piece."""

    @abstractmethod
    def event(self, shown: Json) -> bytes:
        """The event for one thing that is shown."""

    @abstractmethod
    def closing(self, choices: Sequence[Choice], usage: Json) -> bytes:
        """The events after all choices have ended."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The event that says why a stream ends early."""
