"""The turns of a chat: fitted to the model's context, saved to a file and loaded from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from pass_runtime.cli.batch_request import first_problem
from pass_runtime.errors import PassError
from pass_runtime.files import read_text, write_whole
from pass_runtime.session import Session
from pass_runtime.text.messages import TextMessage

Turn = dict[str, str]
FILE = TypeAdapter(list[TextMessage])


class Template(Protocol):
    """Checks whether messages can be rendered: a session, or a server."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]], /) -> Sequence[int]:
        """The prompt for messages; PassError where the chat template refuses them."""


@dataclass
class Conversation:
    """system: the system message at the beginning, which is never dropped. turns: all other messages, oldest first."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, user: str | None = None) -> list[Turn]:
        """All messages, with `user` as the user's next one."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns, *([{"role": "user", "content": user}] if user is not None else [])]

    def add(self, user: str, assistant: str) -> None:
        self.turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    def drop_oldest(self) -> None:
        """Drop the oldest user message and all others up to the next one."""
        later = (i for i, turn in enumerate(self.turns) if i and turn["role"] == "user")
        del self.turns[: next(later, len(self.turns))]

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(self.messages(), ensure_ascii=False, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, template: Template) -> Conversation:
        """Read what `save` wrote, or any JSON list of {"role", "content"} that ends with an answer."""
        try:
            turns = [message.plain() for message in FILE.validate_json(read_text(path))]
        except ValidationError as error:
            raise PassError(f"{path}: {first_problem(error)}") from None
        system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else None
        loaded = cls(system, turns)
        if turns and (turns[0]["role"], turns[-1]["role"]) != ("user", "assistant"):
            raise PassError(f"{path}: a conversation begins with a user's message and ends with the assistant's answer")
        template.encode_chat(loaded.messages("?"))  # raises where the template refuses it: the present one is kept then
        return loaded


def fit(conversation: Conversation, user: str, session: Session, room: int, *, drop: bool) -> tuple[list[int], int]:
    """-> (the prompt for the answer to `user`, how many exchanges had to be dropped from `conversation` for it).

    The prompt leaves `room` tokens of the context, or half of the context where `room` is more. A message that is too
    long for that by itself, after all exchanges were dropped, may use the whole context.
    PassError where the conversation does not fit and `drop` is off, or the template refuses; nothing is dropped then.
    """
    context = session.backend.capabilities.max_capacity
    room = min(room, context // 2)
    shortened, dropped = Conversation(conversation.system, list(conversation.turns)), 0
    ids = session.encode_chat(shortened.messages(user))
    while len(ids) + room > context and shortened.turns:
        if not drop:
            raise PassError(
                f"the conversation has {len(ids)} tokens, and with {room} for the answer that is more than the context "
                f"of {context}; /reset, or use --context-overflow drop-oldest"
            )
        shortened.drop_oldest()
        dropped += 1
        ids = session.encode_chat(shortened.messages(user))
    if len(ids) > context:
        raise PassError(
            f"the message makes a prompt of {len(ids)} tokens, more than the context of {context}; shorten it"
        )
    conversation.turns = shortened.turns
    return ids, dropped
