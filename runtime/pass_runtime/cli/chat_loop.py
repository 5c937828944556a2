"""pass-run chat: answers messages and commands, from a terminal, a pipe or a file."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from pass_runtime.cli import flags as opts
from pass_runtime.cli.prompt_io import print_pieces, print_summary
from pass_runtime.commands.errors import (
    Interrupted,
    OneLineCommand,
    Terminated,
    one_line_errors,
    report,
    require,
)
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions, LoadOptions
from pass_runtime.session import Session

if TYPE_CHECKING:
    from prompt_toolkit import Application

Reader = Callable[[], str | None]
"""Returns the next line, or None at the end (Ctrl-D, or Ctrl-C at the prompt)."""


def open_reader() -> Reader:
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
        except (EOFError, KeyboardInterrupt):  # prompt_toolkit's own, at Ctrl-C
            return None

    return read


@contextmanager
def _ended_by_sigterm(app: Application[str]) -> Iterator[None]:
    """End `app` with `Terminated` at SIGTERM. An exception of the signal handler itself would be
    reported as a failed callback."""

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


HELP = """\
/reset        forget the conversation; the system message stays
/system TEXT  set the system message; without TEXT, remove it
/quit         end, as Ctrl-D does
Ctrl-C        stop an answer; at the prompt, end"""


class ChatLoop:
    """Answers messages and commands. system: the text of a system message, which is never dropped.
    drop: if the context is full, drop the oldest exchanges, and do not refuse the message."""

    def __init__(
        self,
        session: Session,
        options: GenerateOptions,
        system: str | None,
        *,
        drop: bool,
        show_drafts: bool = False,
    ) -> None:
        self.session, self.options, self.drop = session, options, drop
        self.show_drafts = show_drafts
        self.system = _message("system", system)
        self.history: list[dict[str, str]] = []
        """All messages but that of the system, oldest first."""
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: click.echo(HELP, err=True),
            "/reset": lambda _: self.history.clear(),
            "/system": lambda text: self._set(_message("system", text), self.history),
        }

    def run(self) -> int:
        """Answer every line of standard input, and return how many failed."""
        self._set(self.system, self.history)
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
            except Interrupted:
                click.echo("[stopped]", err=True)

    def _handle(self, line: str) -> None:
        command, _, argument = line.strip().partition(" ")
        if command in self.commands:
            self.commands[command](argument.strip())
        elif command[:1] == "/" and command[1:].isalpha():
            raise PassError(f"unknown command {command}; /help lists them")
        elif command:
            self._answer(line)

    def _set(self, system: list[dict[str, str]], history: list[dict[str, str]]) -> None:
        """Raises PassError if the chat template refuses these messages with one of the user next:
        some templates take no system message."""
        self.session.encode_chat([*system, *history, *_message("user", "?")])
        self.system, self.history = system, history

    def _answer(self, user: str) -> None:
        generation = None
        try:
            ids = self._fitted(_message("user", user))
            generation = self.session.generate(ids, self.options)
            print_pieces(generation, show_drafts=self.show_drafts)
        except Interrupted:
            if generation is not None:
                generation.cancel()
            click.echo(" [stopped]", nl=False, err=True)
        click.echo()
        if generation is None or not (generation.text or generation.finish_reason):
            return  # stopped before the first token
        self.history += [*_message("user", user), {"role": "assistant", "content": generation.text}]
        print_summary(generation, show_drafts=self.show_drafts)

    def _fitted(self, user: list[dict[str, str]]) -> list[int]:
        """Return the token ids of the conversation with the message `user`, without the oldest
        exchanges if it would not fit. Raises PassError, and drops nothing, if it cannot fit.

        The prompt leaves --max-new-tokens of the context free, but no more than half of it. A
        message that does not, even without the history, may use the whole context."""
        context = self.session.backend.capabilities.max_capacity
        answer_tokens = min(self.options.max_new_tokens, context // 2)
        history, dropped = list(self.history), 0
        ids = self.session.encode_chat([*self.system, *history, *user])
        while len(ids) + answer_tokens > context and history:
            if not self.drop:
                raise PassError(
                    f"the conversation ({len(ids)} tokens) and the answer ({answer_tokens}) do not "
                    f"fit into the context of {context} tokens; /reset, or use --context-overflow "
                    "drop-oldest"
                )
            users = (i for i, message in enumerate(history) if i and message["role"] == "user")
            del history[: next(users, len(history))]
            dropped += 1
            ids = self.session.encode_chat([*self.system, *history, *user])
        if len(ids) > context:
            raise PassError(
                f"the prompt has {len(ids)} tokens, more than the context of {context}; shorten "
                "the message"
            )
        if dropped:
            exchanges = "exchange" if dropped == 1 else f"{dropped} exchanges"
            click.echo(f"the context is full: dropped the oldest {exchanges}", err=True)
        self.history = history
        return ids


def _message(role: str, text: str | None) -> list[dict[str, str]]:
    return [{"role": role, "content": text}] if text else []


@click.command(cls=OneLineCommand)
@opts.BUNDLE
@click.option("--system", help="A system message before the conversation.")
@click.option(
    "--context-overflow",
    type=click.Choice(["drop-oldest", "stop"]),
    default="drop-oldest",
    show_default=True,
    help="If a new message does not fit into the context: drop the oldest exchanges, or refuse "
    "the message. Room for --max-new-tokens, at most half of the context, is kept free. The "
    "system message is never dropped.",
)
@opts.generation_options
@opts.SEED
@opts.load_flags("prefix_cache")
@opts.SHOW_DRAFTS
@one_line_errors
def chat(
    bundle: Path, system: str | None, context_overflow: str, show_drafts: bool, **options: Any
) -> None:
    """Talk to the model, in a terminal or line by line from a pipe.

    /help lists the commands: /reset /system /quit. Ctrl-C stops an answer; at the
    prompt, Ctrl-C and Ctrl-D end the chat. A message that cannot be answered is reported and
    skipped; the status is then 2 at the end, if the messages come from a pipe or a file.
    """
    require("cpu")
    request = opts.generate_options(options, reuse_prefix=True)
    drop = context_overflow == "drop-oldest"
    session = opts.open_bundle(bundle, LoadOptions(**options))
    loop = ChatLoop(session, request, system, drop=drop, show_drafts=show_drafts)
    failed = loop.run()
    if failed and not sys.stdin.isatty():
        sys.exit(2)
