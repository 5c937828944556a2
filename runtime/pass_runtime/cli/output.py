"""Prints a generation: its text as it streams, with --show-drafts coloured by where its tokens came from, and a line of
statistics at the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import click

from pass_runtime.decode.sequence import Piece, Token, TokenSource
from pass_runtime.generation import Generation
from pass_runtime.json_lines import to_json

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
