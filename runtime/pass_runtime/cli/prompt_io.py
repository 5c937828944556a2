"""Reads prompts from flags, files and standard input (`-`), and prints generations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size

import click
from pydantic import TypeAdapter, ValidationError

from pass_runtime.decode.sequence import Piece, Token, TokenSource
from pass_runtime.errors import PassError
from pass_runtime.files import Line, lines_of, to_json
from pass_runtime.generation import Generation
from pass_runtime.text.templates import TextMessage

STDIN = Path("-")
MESSAGES = TypeAdapter(list[TextMessage])


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a .jsonl file that are not blank."""
    return lines_of(_read(path, "the input"))


def checked_messages(value: object) -> list[dict[str, str]]:
    """Return a JSON list of {"role", "content"} as chat templates take it."""
    try:
        return [message.plain() for message in MESSAGES.validate_python(value)]
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, ("messages", *problem["loc"])))
        raise PassError(f"{place}: {problem['msg']}") from None


def read_prompts(path: Path) -> list[str]:
    """Return the "prompt" of every line of a .jsonl file."""
    prompts = []
    for line in read_lines(path):
        try:
            prompt = line.object().get("prompt")
            if not isinstance(prompt, str):
                raise PassError('it needs a "prompt" that is text')
        except PassError as error:
            raise PassError(f"{path}, line {line.number}: {error}") from None
        prompts.append(prompt)
    if not prompts:
        raise PassError(f'{path} is empty: it needs a line with a "prompt"')
    return prompts


def read_prompt(prompt: str | None, file: Path | None, *, keep_newline: bool = False) -> str:
    """Return the prompt: of -p as it is, of a file or standard input without its last line feed."""
    if prompt is not None and file is not None:
        raise PassError("give the prompt with -p or with --prompt-file, not both")
    if prompt is not None:
        if keep_newline:
            raise PassError(
                "--keep-newline is for prompts from a file or standard input: -p is taken as it is"
            )
        return prompt
    text = _read(file or STDIN, "the prompt")
    if keep_newline:
        return text
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")


def _read(path: Path, what: str) -> str:
    name = "standard input" if path == STDIN else str(path)
    try:
        return (_standard_input(what) if path == STDIN else path.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise PassError(f"cannot read {what} from {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PassError(f"{what} in {name} is not UTF-8 text") from None


def _standard_input(what: str) -> bytes:
    if sys.stdin is None:
        raise PassError(f"standard input is closed: give {what} in another way")
    if sys.stdin.isatty():
        click.echo(f"reading {what} from the terminal; end with Ctrl-D", err=True)
    return sys.stdin.buffer.read()


SOURCES: Mapping[TokenSource, tuple[str | None, str]] = {
    "model": (None, "the model's own"),
    "lookahead": ("green", "look-ahead drafts"),
    "ngram": ("cyan", "n-gram drafts"),
    "grammar": ("magenta", "forced by the constraint"),
}
"""By the source of tokens, their colour and what it means."""


def coloured(piece: Piece) -> str:
    """Return the text of a piece, with each token in the colour of its source."""
    parts = [
        click.style(token.text, fg=SOURCES[token.source][0]) if token.text else ""
        for token in piece.tokens
    ]
    return "".join(parts) or piece.text


def legend(tokens: Sequence[Token]) -> str:
    """Return how many tokens came from each source, in its colour."""
    counts = Counter(token.source for token in tokens)
    entries = [
        click.style(f"{counts[source]} {label}", fg=colour)
        for source, (colour, label) in SOURCES.items()
        if counts[source]
    ]
    return ", ".join(entries) or "no tokens"


def print_pieces(pieces: Iterable[Piece], *, show_drafts: bool) -> None:
    for piece in pieces:
        click.echo(coloured(piece) if show_drafts else piece.text, nl=False)  # flushes


def print_json(generation: Generation) -> None:
    """Print the result as JSON when it is complete, or the command interrupted."""
    try:
        generation.result()
    except KeyboardInterrupt:
        generation.cancel()
        click.echo(to_json(generation.result().as_dict()))
        raise
    click.echo(to_json(generation.as_dict()))


def print_summary(generation: Generation, *, show_drafts: bool) -> None:
    """Print on stderr the legend if `show_drafts` is set, and statistics if it is a terminal."""
    if show_drafts:
        click.echo(f"[{legend(generation.tokens)}]", err=True)
    if sys.stderr is None or not sys.stderr.isatty():
        return
    stats = generation.stats
    line = (
        f"[{stats.generated_tokens} tokens, {stats.decode_tokens_per_second:.1f} tokens/s, "
        f"plan {stats.plan}, tau {stats.tau:.2f}, prefill {stats.prefill_seconds * 1e3:.0f} ms of "
        f"{stats.prompt_tokens - stats.cached_tokens} tokens, "
        f"finished by {generation.finish_reason}]"
    )
    click.secho(click.wrap_text(line, get_terminal_size().columns), err=True, dim=True)
