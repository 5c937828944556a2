"""pass-run chat: reads messages and commands line by line, and answers them. A line that fails does
not end the chat.

Lines are typed in a terminal, with editing and history, or read from a pipe or a file. If the
conversation outgrows the model's context, its oldest exchanges are dropped.
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

from pass_runtime.cli.prompt_io import print_pieces, print_summary
from pass_runtime.cli.request_line import first_problem
from pass_runtime.commands.errors import Interrupted, Terminated, report
from pass_runtime.errors import PassError
from pass_runtime.files import read_text, write_whole
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session
from pass_runtime.text.chat_template import TextMessage

if TYPE_CHECKING:
    from prompt_toolkit import Application

Reader = Callable[[], str | None]
"""A function that returns the next line, or None at the end (Ctrl-D, or Ctrl-C at the prompt). It
raises PassError if the line is not UTF-8."""


def open_reader() -> Reader:
    """Return the reader of standard input."""
    if sys.stdin is None:  # closed
        return lambda: None
    return _terminal_reader() if sys.stdin.isatty() else _stream_reader(sys.stdin.buffer)


def _terminal_reader() -> Reader:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(output=create_output(always_prefer_tty=True))

    def read() -> str | None:
        try:
            with _ended_by_sigterm(session.app):
                return session.prompt("> ")
        except Terminated:  # a KeyboardInterrupt, too
            raise
        # At Ctrl-C prompt_toolkit raises a plain KeyboardInterrupt, not our `Interrupted`.
        except (EOFError, KeyboardInterrupt):
            return None

    return read


@contextmanager
def _ended_by_sigterm(app: Application[str]) -> Iterator[None]:
    """Within this context, end `app` with `Terminated` at SIGTERM. If the signal handler itself
    raised an exception, the app's event loop would report a failed callback."""

    def end() -> None:
        with suppress(Exception):  # raised if the app has ended already
            app.exit(exception=Terminated())

    def terminate(number: int, frame: FrameType | None) -> None:
        if app.is_running and app.loop is not None:
            app.loop.call_soon_threadsafe(end)
        elif callable(previous):
            previous(number, frame)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _stream_reader(stream: BinaryIO) -> Reader:
    def read() -> str | None:
        try:
            line = stream.readline()
        except Interrupted:
            return None
        try:
            text = line.decode().removesuffix("\n").removesuffix("\r").removeprefix("\ufeff")
            return text if line else None
        except UnicodeDecodeError:
            raise PassError("skipped a line that is not UTF-8 text; encode it as UTF-8") from None

    return read


Message = dict[str, str]
SAVED_MESSAGES = TypeAdapter(list[TextMessage])  # checks the JSON that /load reads


@dataclass
class Conversation:
    """The messages so far. system: the system message, which comes first and is never dropped.
    history: all other messages, oldest first."""

    system: str | None = None
    history: list[Message] = field(default_factory=list)

    def messages(self, user: str | None = None) -> list[Message]:
        """Return all messages. user: the text of a further message, by the user."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        ending = [{"role": "user", "content": user}] if user is not None else []
        return [*opening, *self.history, *ending]

    def add(self, user: str, assistant: str) -> None:
        self.history += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ]

    def drop_oldest(self) -> None:
        """Drop the oldest user message and all messages before the next one."""
        later = (i for i, message in enumerate(self.history) if i and message["role"] == "user")
        del self.history[: next(later, len(self.history))]

    def check(self, session: Session) -> None:
        """Raise PassError if the chat template refuses these messages with one of the user next."""
        session.encode_chat(self.messages("?"))

    def save(self, path: Path) -> None:
        write_whole(path, json.dumps(self.messages(), ensure_ascii=False, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path, session: Session) -> Conversation:
        """Read a JSON list of {"role", "content"}. After a system message, if any, the first role
        is "user", and the last is "assistant"."""
        try:
            history = [message.plain() for message in SAVED_MESSAGES.validate_json(read_text(path))]
        except ValidationError as error:
            raise PassError(f"{path}: {first_problem(error)}") from None
        system = history.pop(0)["content"] if history and history[0]["role"] == "system" else None
        if history and (history[0]["role"], history[-1]["role"]) != ("user", "assistant"):
            raise PassError(
                f"{path}: a conversation begins with a user's message and ends with the "
                "assistant's answer"
            )
        loaded = cls(system, history)
        loaded.check(session)
        return loaded


def fit(
    conversation: Conversation, user: str, session: Session, answer_tokens: int, *, drop: bool
) -> tuple[list[int], int]:
    """Return the token ids of the conversation with the message `user`, and how many of the oldest
    exchanges were dropped from `conversation` to make room.

    The prompt leaves `answer_tokens` of the context free, but no more than half of the context. A
    message that does not, even without the history, may use the whole context. Raises PassError,
    and drops nothing, if exchanges would have to be dropped and `drop` is off, if the message alone
    is longer than the context, or if the chat template refuses the messages.
    """
    context = session.backend.capabilities.max_capacity
    answer_tokens = min(answer_tokens, context // 2)
    shortened, dropped = Conversation(conversation.system, list(conversation.history)), 0
    ids = session.encode_chat(shortened.messages(user))
    while len(ids) + answer_tokens > context and shortened.history:
        if not drop:
            raise PassError(
                f"the conversation ({len(ids)} tokens) and the answer ({answer_tokens}) do not fit "
                f"into the context of {context} tokens; /reset, or use --context-overflow "
                "drop-oldest"
            )
        shortened.drop_oldest()
        dropped += 1
        ids = session.encode_chat(shortened.messages(user))
    if len(ids) > context:
        raise PassError(
            f"the prompt has {len(ids)} tokens, more than the context of {context}; shorten "
            "the message"
        )
    conversation.history = shortened.history
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
    """Answers messages and commands. drop: whether to drop old exchanges, as for `fit`."""

    session: Session
    options: GenerateOptions
    conversation: Conversation
    drop: bool
    show_drafts: bool = False

    def run(self) -> int:
        """Answer every line of standard input. Report lines that fail, and return how many do."""
        self.conversation.check(self.session)
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
            except Interrupted:  # in a command, such as /load of a pipe that nobody writes to
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
            "/reset": lambda _: self.conversation.history.clear(),
            "/system": self._set_system,
            "/save": self._save,
            "/load": self._load,
        }

    def _set_system(self, text: str) -> None:
        changed = Conversation(text or None, self.conversation.history)
        changed.check(self.session)  # some templates take no system message
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
            ids, dropped = fit(
                self.conversation, user, self.session, self.options.max_new_tokens, drop=self.drop
            )
            if dropped:
                exchanges = "exchange" if dropped == 1 else f"{dropped} exchanges"
                click.echo(f"the context is full: dropped the oldest {exchanges}", err=True)
            generation = self.session.generate(ids, self.options)
            print_pieces(generation, show_drafts=self.show_drafts)
        except Interrupted:
            if generation is not None:
                generation.cancel()
            click.echo(" [stopped]", nl=False, err=True)
        click.echo()
        if generation is None or not (generation.text or generation.finish_reason):
            return  # stopped before the first token
        self.conversation.add(user, generation.text)
        print_summary(generation, show_drafts=self.show_drafts)


def _path(command: str, name: str) -> Path:
    if not name:
        raise PassError(f"name a file: {command} FILE")
    return Path(name).expanduser()
