"""Reads prompts from flags, files and standard input (the path `-`), and prints generations: the
text while it is generated, with --show-drafts in colours, then a line of statistics."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size

import click

from pass_runtime.decode.sequence import Piece, Token, TokenSource
from pass_runtime.errors import PassError
from pass_runtime.files import Line, lines_of, to_json
from pass_runtime.generation import Generation

STDIN = Path("-")


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a .jsonl file that are not blank."""
    return lines_of(_read(path, "the input"))


def read_prompts(path: Path) -> list[str]:
    """Return the "prompt" of every line of a .jsonl file. Raises PassError if a line has none."""
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
    """Read UTF-8 text with its line ends, without a byte order mark. what: its name in messages."""
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


COLOURS: Mapping[TokenSource, str | None] = {
    "model": None,
    "lookahead": "green",
    "ngram": "cyan",
    "grammar": "magenta",
}
SOURCE_LABELS: Mapping[TokenSource, str] = {
    "model": "the model's own",
    "lookahead": "look-ahead drafts",
    "ngram": "n-gram drafts",
    "grammar": "forced by the constraint",
}


def coloured(piece: Piece) -> str:
    """Return the text of a piece, with each token in the colour of its source; without tokens it
    has no colour. `click.echo` removes the colours if standard output is no terminal."""
    parts = [
        click.style(token.text, fg=COLOURS[token.source]) if token.text else ""
        for token in piece.tokens
    ]
    return "".join(parts) or piece.text


def legend(tokens: Sequence[Token]) -> str:
    """Return how many tokens came from each source, in its colour."""
    counts = Counter(token.source for token in tokens)
    entries = [
        click.style(f"{counts[source]} {label}", fg=COLOURS[source])
        for source, label in SOURCE_LABELS.items()
        if counts[source]
    ]
    return ", ".join(entries) or "no tokens"


def print_pieces(pieces: Iterable[Piece], *, show_drafts: bool) -> None:
    """Print the text of every piece as soon as it is generated."""
    for piece in pieces:
        click.echo(coloured(piece) if show_drafts else piece.text, nl=False)  # flushes


def print_json(generation: Generation) -> None:
    """Print the result as JSON once it is complete or the command is interrupted."""
    try:
        generation.result()
    except KeyboardInterrupt:
        generation.cancel()
        click.echo(to_json(generation.result().as_dict()))
        raise
    click.echo(to_json(generation.as_dict()))


def summary(generation: Generation) -> str:
    """Return the statistics of a generation in one line."""
    stats = generation.stats
    parts = [
        f"{stats.generated_tokens} tokens",
        f"{stats.decode_tokens_per_second:.1f} tokens/s",
        f"plan {stats.plan}",
        f"tau {stats.tau:.2f}",
        (
            f"prefill {stats.prefill_seconds * 1e3:.0f} ms of "
            f"{stats.prompt_tokens - stats.cached_tokens} tokens"
        ),
        f"finished by {generation.finish_reason}",
    ]
    return "[" + ", ".join(parts) + "]"


def print_summary(generation: Generation, *, show_drafts: bool) -> None:
    """Print on stderr the legend if `show_drafts` is set, and the summary if it is a terminal."""
    if show_drafts:
        click.echo(f"[{legend(generation.tokens)}]", err=True)
    if sys.stderr is not None and sys.stderr.isatty():
        click.secho(
            click.wrap_text(summary(generation), get_terminal_size().columns), err=True, dim=True
        )
