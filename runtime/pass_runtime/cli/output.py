"""What people see of a generation: the text as it streams, with --show-drafts in the colours of where its tokens came
from, and a line about it in the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import click

from pass_runtime.decode.sequence import Source, Token
from pass_runtime.generation import Generation, Piece

COLOURS: Mapping[Source, str | None] = {"model": None, "lookahead": "green", "ngram": "cyan"}
NAMES: Mapping[Source, str] = {
    "model": "the model's own",
    "lookahead": "look-ahead drafts",
    "ngram": "drafts from the text",
}


def coloured(piece: Piece) -> str:
    """The text of a piece, every token's in the colour of its source. (click leaves colours out where they would not
    be seen.)"""
    parts = [click.style(token.text, fg=COLOURS[token.source]) if token.text else "" for token in piece.tokens]
    return "".join(parts) or piece.text


def legend(tokens: Sequence[Token]) -> str:
    """One line: how many tokens came from where, in their colours."""
    counts = Counter(token.source for token in tokens)
    shares = (f"{counts[source]} {name}" for source, name in NAMES.items() if counts[source])
    styled = zip(shares, (source for source in NAMES if counts[source]), strict=True)
    return ", ".join(click.style(text, fg=COLOURS[source]) for text, source in styled) or "no tokens"


def print_pieces(pieces: Iterable[Piece], *, show_drafts: bool) -> None:
    """Print pieces as they come."""
    for piece in pieces:
        click.echo(coloured(piece) if show_drafts else piece.text, nl=False)  # flushes


def summary(generation: Generation) -> str:
    """One line about a generation."""
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
    """On stderr, where somebody may be looking: always with `show_drafts`, else in a terminal."""
    if show_drafts:
        click.echo(f"[{legend(generation.tokens)}]", err=True)
    if sys.stderr.isatty():
        click.secho(summary(generation), err=True, dim=True)
