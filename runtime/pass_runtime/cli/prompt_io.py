"""Reads prompts from flags, files and standard input, whose name is `-`, and prints generations.

Text is printed as it streams, with --show-drafts coloured by where its tokens came from, then a line of statistics.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from pass_runtime.decode.sequence import Piece, Token, TokenSource
from pass_runtime.errors import PassError
from pass_runtime.files import Line, lines_of, to_json
from pass_runtime.generation import Generation

STDIN = Path("-")


def read_lines(path: Path) -> list[Line]:
    """The lines of a .jsonl file that are not blank."""
    return lines_of(_read(path, "the input"))


def read_prompts(path: Path) -> list[str]:
    """The "prompt" of every line of a .jsonl file; PassError names the line that has none."""
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
    """-p, --prompt-file or standard input: one of them. A file's last line feed is not part of the prompt."""
    if prompt is not None and file is not None:
        raise PassError("give the prompt with -p or with --prompt-file, not both")
    if prompt is not None:
        if keep_newline:
            raise PassError("--keep-newline is for prompts from a file or standard input: -p is taken as it is")
        return prompt
    text = _read(file or STDIN, "the prompt")
    if keep_newline:
        return text
    return text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")


def _read(path: Path, what: str) -> str:
    """UTF-8 text, line ends as they are; a byte order mark is no part of it."""
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


COLOURS: Mapping[TokenSource, str | None] = {"model": None, "lookahead": "green", "ngram": "cyan", "grammar": "magenta"}
NAMES: Mapping[TokenSource, str] = {
    "model": "the model's own",
    "lookahead": "look-ahead drafts",
    "ngram": "n-gram drafts",
    "grammar": "forced by the constraint",
}


def coloured(piece: Piece) -> str:
    """The text of a piece, with the text of every token in the colour of its source. (click removes colours where
    standard output is no terminal.)"""
    parts = [click.style(token.text, fg=COLOURS[token.source]) if token.text else "" for token in piece.tokens]
    return "".join(parts) or piece.text


def legend(tokens: Sequence[Token]) -> str:
    """How many tokens came from each source, in its colour."""
    counts = Counter(token.source for token in tokens)
    shares = (f"{counts[source]} {name}" for source, name in NAMES.items() if counts[source])
    styled = zip(shares, (source for source in NAMES if counts[source]), strict=True)
    return ", ".join(click.style(text, fg=COLOURS[source]) for text, source in styled) or "no tokens"


def print_pieces(pieces: Iterable[Piece], *, show_drafts: bool) -> None:
    """Print the text of pieces as they come."""
    for piece in pieces:
        click.echo(coloured(piece) if show_drafts else piece.text, nl=False)  # flushes


def print_json(generation: Generation) -> None:
    """Print one JSON object at the end. At an interrupt it holds what was written until then."""
    try:
        generation.result()
    except KeyboardInterrupt:
        generation.cancel()
        click.echo(to_json(generation.result().as_dict()))
        raise
    click.echo(to_json(generation.as_dict()))


def summary(generation: Generation) -> str:
    """The statistics of a generation, in one line."""
    stats = generation.stats
    parts = [
        f"{stats.generated_tokens} tokens",
        f"{stats.decode_tokens_per_second:.1f} tokens/s",
        f"plan {stats.plan}",
        f"tau {stats.tau:.2f}",
        f"prefill {stats.prefill_seconds * 1e3:.0f} ms of {stats.prompt_tokens - stats.cached_tokens} tokens",
        f"finished by {generation.finish_reason}",
    ]
    return "[" + ", ".join(parts) + "]"


def print_summary(generation: Generation, *, show_drafts: bool) -> None:
    """Print the summary on stderr where that is a terminal, and with `show_drafts` the counts by source in any case."""
    if show_drafts:
        click.echo(f"[{legend(generation.tokens)}]", err=True)
    if sys.stderr is not None and sys.stderr.isatty():
        click.secho(summary(generation), err=True, dim=True)
