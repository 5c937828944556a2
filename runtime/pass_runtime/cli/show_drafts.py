"""--show-drafts: the text as it streams, coloured by where its tokens came from. Plain where it is no terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import click

from pass_runtime.decode.sequence import Source, Token
from pass_runtime.generation import Piece

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
    """Print pieces as they come, and end the line."""
    for piece in pieces:
        click.echo(coloured(piece) if show_drafts else piece.text, nl=False)  # flushes
    click.echo()
