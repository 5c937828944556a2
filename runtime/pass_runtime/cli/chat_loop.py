"""pass-run chat: the loop over the lines of a conversation. A line that fails does not end it.

Lines are typed in a terminal, with editing and history, or read from a pipe or a file. The turns of the conversation
are fitted to the model's context, saved to a file and loaded from it.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

import click
from pydantic import TypeAdapter, ValidationError

from pass_runtime.cli.batch_session import first_problem
from pass_runtime.cli.command_errors import Interrupted, Terminated, report
from pass_runtime.cli.prompt_io import print_pieces, print_summary
from pass_runtime.errors import PassError
from pass_runtime.files import read_text, write_whole
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session
from pass_runtime.text.chat_template import TextMessage

if TYPE_CHECKING:
    from prompt_toolkit import Application

Reader = Callable[[], str | None]
"""Returns the next line, None at the end (Ctrl-D, or Ctrl-C at the prompt). PassError for a line that is not UTF-8."""


def open_reader() -> Reader:
    if sys.stdin is None:  # closed
        return lambda: None
    return _terminal() if sys.stdin.isatty() else _lines(sys.stdin.buffer)


def _terminal() -> Reader:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(output=create_output(always_prefer_tty=True))

    def read() -> str | None:
        try:
            with _ended_by_sigterm(session.app):
                return session.prompt("> ")
        except Terminated:
            raise
        except (EOFError, KeyboardInterrupt):  # prompt_toolkit raises a plain KeyboardInterrupt at Ctrl-C
            return None

    return read


@contextmanager
def _ended_by_sigterm(app: Application[str]) -> Iterator[None]:
    """At SIGTERM, make `app` end with `Terminated`. Raised from the signal handler, it would look like a failure of the
    event loop's callback that happens to be running."""

    def end() -> None:
        with suppress(Exception):  # the app has ended already
            app.exit(exception=Terminated())

    def terminate(number: int, frame: FrameType | None) -> None:
        if app.is_running and app.loop is not None:
            app.loop.call_soon_threadsafe(end)
        elif callable(before):
            before(number, frame)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _lines(stream: BinaryIO) -> Reader:
    def read() -> str | None:
        try:
            line = stream.readline()
        except Interrupted:
            return None
        try:
            return line.decode().removesuffix("\n").removesuffix("\r").removeprefix("\ufeff") if line else None
        except UnicodeDecodeError:
            raise PassError("a line that is not UTF-8 text was not read") from None

    return read


Turn = dict[str, str]
FILE = TypeAdapter(list[TextMessage])


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
    def load(cls, path: Path, session: Session) -> Conversation:
        """Read what `save` wrote, or any JSON list of {"role", "content"} that ends with an answer."""
        try:
            turns = [message.plain() for message in FILE.validate_json(read_text(path))]
        except ValidationError as error:
            raise PassError(f"{path}: {first_problem(error)}") from None
        system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else None
        loaded = cls(system, turns)
        if turns and (turns[0]["role"], turns[-1]["role"]) != ("user", "assistant"):
            raise PassError(f"{path}: a conversation begins with a user's message and ends with the assistant's answer")
        session.encode_chat(loaded.messages("?"))  # raises where the template refuses it: the present one is kept then
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


HELP = """\
/reset        forget the conversation; the system message stays
/system TEXT  set the system message; without TEXT, remove it
/save FILE    write the conversation to FILE, as JSON
/load FILE    go on with the conversation in FILE
/quit         end, as Ctrl-D does
Ctrl-C        stop an answer; at the prompt, end"""


@dataclass
class ChatLoop:
    """Reads lines and commands, and answers. drop: whether the oldest exchanges are dropped once the context is
    full."""

    session: Session
    options: GenerateOptions
    conversation: Conversation
    drop: bool
    show_drafts: bool = False

    def run(self) -> int:
        """Answer every line of standard input. A line that fails is reported and skipped. -> how many lines failed"""
        self.session.encode_chat(self.conversation.messages("?"))  # raises if the template refuses any message
        self.session.resolve(self.options)
        read, failed = open_reader(), 0
        while True:
            try:
                line = read()
                if line is None or line.strip() == "/quit":
                    return failed
                self._handle(line)
            except PassError as error:
                failed += 1
                report(error)
            except Interrupted:  # during a command, such as /load from a pipe without a writer
                click.echo("[stopped]", err=True)

    def _handle(self, line: str) -> None:
        command, _, argument = line.strip().partition(" ")
        if command in self._commands:
            self._commands[command](argument.strip())
        elif command[:1] == "/" and command[1:].isalpha():
            raise PassError(f"unknown command {command}; /help lists them")
        elif command:
            self._answer(line)

    @property
    def _commands(self) -> dict[str, Callable[[str], None]]:
        return {
            "/help": lambda _: click.echo(HELP, err=True),
            "/reset": lambda _: self.conversation.turns.clear(),
            "/system": self._set_system,
            "/save": self._save,
            "/load": self._load,
        }

    def _set_system(self, text: str) -> None:
        changed = Conversation(text or None, self.conversation.turns)
        self.session.encode_chat(changed.messages("?"))  # some templates take no system message
        self.conversation = changed

    def _save(self, name: str) -> None:
        path = _path("/save", name)
        self.conversation.save(path)
        click.echo(f"{len(self.conversation.messages())} messages written to {path}", err=True)

    def _load(self, name: str) -> None:
        path = _path("/load", name)
        self.conversation = Conversation.load(path, self.session)
        click.echo(f"{len(self.conversation.messages())} messages read from {path}", err=True)

    def _answer(self, user: str) -> None:
        """Print the answer to `user`, and add both to the conversation."""
        generation = None
        try:
            ids, dropped = fit(self.conversation, user, self.session, self.options.max_new_tokens, drop=self.drop)
            if dropped:
                what = "exchange" if dropped == 1 else f"{dropped} exchanges"
                click.echo(f"the context is full: the oldest {what} dropped", err=True)
            generation = self.session.generate(ids, self.options)
            print_pieces(generation, show_drafts=self.show_drafts)
        except Interrupted:
            if generation is not None:
                generation.cancel()
            click.echo(" [stopped]", nl=False, err=True)
        click.echo()
        if generation is None or not (generation.text or generation.finish_reason):
            return  # stopped before anything was said
        self.conversation.add(user, generation.text)
        print_summary(generation, show_drafts=self.show_drafts)


def _path(command: str, name: str) -> Path:
    if not name:
        raise PassError(f"name a file: {command} FILE")
    return Path(name).expanduser()
