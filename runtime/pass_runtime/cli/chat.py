"""pass-run chat: the loop over the lines of a conversation. A line that fails does not end it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from pass_runtime.cli.conversation import Conversation, Template, fit
from pass_runtime.cli.errors import Interrupted, report
from pass_runtime.cli.line_reader import open_reader
from pass_runtime.cli.output import print_pieces, print_summary
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

HELP = """\
/reset        forget the conversation; the system message stays
/system TEXT  set the system message; without TEXT, remove it
/save FILE    write the conversation to FILE, as JSON
/load FILE    go on with the conversation in FILE
/quit         end, as Ctrl-D does
Ctrl-C        stop an answer; at the prompt, end"""


@dataclass
class ChatLoop(ABC):
    """Reads lines and commands; subclasses answer. drop: whether the oldest exchanges are dropped once the context is
    full."""

    template: Template
    options: GenerateOptions
    conversation: Conversation
    drop: bool

    def run(self) -> int:
        """Answer every line of standard input. A line that fails is reported and skipped. -> how many lines failed"""
        self._begin()
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
        self.template.encode_chat(changed.messages("?"))  # some templates take no system message
        self.conversation = changed

    def _save(self, name: str) -> None:
        path = _path("/save", name)
        self.conversation.save(path)
        click.echo(f"{len(self.conversation.messages())} messages written to {path}", err=True)

    def _load(self, name: str) -> None:
        path = _path("/load", name)
        self.conversation = Conversation.load(path, self.template)
        click.echo(f"{len(self.conversation.messages())} messages read from {path}", err=True)

    @abstractmethod
    def _begin(self) -> None:
        """Check, before the first line is read, that answers are possible at all; PassError where they are not."""

    @abstractmethod
    def _answer(self, user: str) -> None:
        """Print the answer to `user`, and add both to the conversation."""


@dataclass
class SessionChat(ChatLoop):
    """A chat with a session."""

    template: Session
    show_drafts: bool = False

    def _begin(self) -> None:
        self.template.encode_chat(self.conversation.messages("?"))  # raises where the template refuses any message
        self.template.resolve(self.options)

    def _answer(self, user: str) -> None:
        generation = None
        try:
            ids, dropped = fit(self.conversation, user, self.template, self.options.max_new_tokens, drop=self.drop)
            if dropped:
                what = "exchange" if dropped == 1 else f"{dropped} exchanges"
                click.echo(f"the context is full: the oldest {what} dropped", err=True)
            generation = self.template.generate(ids, self.options)
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
