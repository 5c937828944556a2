"""pass-run chat: a conversation that goes on whatever one line of it does."""

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
class Talk(ABC):
    """Lines and commands, whoever answers. drop: whether the oldest exchanges make room for new ones once the context
    is full."""

    template: Template
    options: GenerateOptions
    conversation: Conversation
    drop: bool

    def run(self) -> None:
        """Answer line after line of standard input, to its end. What goes wrong costs the line it is about."""
        self._begin()
        read = open_reader()
        while True:
            try:
                line = read()
                if line is None or line.strip() == "/quit":
                    return
                self._take(line)
            except PassError as error:
                report(error)
            except Interrupted:  # of a command, such as reading a pipe that nobody writes
                click.echo("[stopped]", err=True)

    def _take(self, line: str) -> None:
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
        """PassError where nothing could be answered."""

    @abstractmethod
    def _answer(self, user: str) -> None:
        """Print the answer, and put both into the conversation."""


@dataclass
class Chat(Talk):
    """A session answers."""

    template: Session
    show_drafts: bool = False

    def _begin(self) -> None:
        self.template.encode_chat(self.conversation.messages("?"))  # what cannot work at all is refused at once
        self.template.mode(self.options)

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
