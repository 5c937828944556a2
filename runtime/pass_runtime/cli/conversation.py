"""What was said in a chat: turns that fit the model's context, saved to and loaded from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter, ValidationError

from pass_runtime.cli.batch_request import Message, first_problem
from pass_runtime.errors import PassError
from pass_runtime.files import read_text, write_whole
from pass_runtime.session import Session

Turn = dict[str, str]
FILE = TypeAdapter(list[Message])


class Template(Protocol):
    """What knows whether messages can be answered."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]], /) -> Sequence[int]:
        """PassError where they cannot be."""


@dataclass
class Conversation:
    """system: the system message before everything, which is never dropped. turns: everybody else's, oldest first."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, user: str | None = None) -> list[Turn]:
        """All of it, and what the user says next."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns, *([{"role": "user", "content": user}] if user is not None else [])]

    def add(self, user: str, assistant: str) -> None:
        self.turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    def drop_oldest(self) -> None:
        """The oldest user message, and all up to the next one."""
        later = (i for i, turn in enumerate(self.turns) if i and turn["role"] == "user")
        del self.turns[: next(later, len(self.turns))]

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(self.messages(), ensure_ascii=False, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, template: Template) -> Conversation:
        """What `save` wrote, or any JSON list of {"role", "content"} that ends with an answer."""
        try:
            turns = [message.model_dump() for message in FILE.validate_json(read_text(path))]
        except ValidationError as error:
            raise PassError(f"{path}: {first_problem(error)}") from None
        system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else None
        loaded = cls(system, turns)
        if turns and (turns[0]["role"], turns[-1]["role"]) != ("user", "assistant"):
            raise PassError(f"{path}: a conversation begins with a user's message and ends with the assistant's answer")
        template.encode_chat(loaded.messages("?"))  # what the template refuses must not take the place of what is there
        return loaded


def fit(conversation: Conversation, user: str, session: Session, room: int, *, drop: bool) -> tuple[list[int], int]:
    """-> (the prompt for the answer to `user`, how many exchanges had to be dropped from `conversation` for it).

    The prompt leaves `room` tokens of the context, or half of it where `room` is more than that. A message that is too
    long for that by itself is left to the session, which takes it while there is any room.
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
