"""Formats the results of `pass-train evaluate` as a table, for terminals and model cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADINGS = (
    "decoding",
    "prompts",
    "places",
    "acceptance of draft 1..L",
    "accepted",
    "tau two-pass",
    "tau fused",
    "in loops",
    "accepted there",
)
EXPLANATION = """A place is a token of the model's answer after which drafts were made. The
acceptance of draft j is the rate at which it is right if the drafts before it are; "accepted" is
the mean number of accepted drafts, tau is tokens per pass. Places in a loop, where the model
repeats itself, are in the last two columns only."""


def rows_of(report: Mapping[str, Any]) -> list[list[str]]:
    """Return a table row with the columns HEADINGS for every temperature and kind of prompts.

    report: what `--json` writes.
    """
    return [
        [
            decoding_label(temperature, report["top_k"]),
            kind,
            str(counts["places"]),
            " ".join(f"{value:.2f}" for value in counts["survival"]),
            f"{counts['accepted']:.2f}",
            f"{counts['tau']['two-pass']:.2f}",
            f"{counts['tau']['fused']:.2f}",
            f"{100 * counts['looping']['share']:.0f} %",
            f"{counts['looping']['accepted']:.2f}" if counts["looping"]["places"] else "-",
        ]
        for temperature, kinds in report["temperatures"].items()
        for kind, counts in kinds.items()
    ]


def decoding_label(temperature: str, top_k: int) -> str:
    """Return a label such as "greedy" or "T=0.8, top-k 50"."""
    if float(temperature) == 0:
        return "greedy"
    return f"T={temperature}" + (f", top-k {top_k}" if top_k else "")


def markdown(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of one or several reports in Markdown, with an explanation.

    reports: by the name of the weights. If there are several, the names are the first column.
    """
    has_names = len(reports) > 1
    first = next(iter(reports.values()))
    headings = (*(["weights"] if has_names else []), *HEADINGS)
    rows = [
        [*([name] if has_names else []), *row]
        for name, report in reports.items()
        for row in rows_of(report)
    ]
    lines = [headings, ["---"] * len(headings), *rows]
    about = (
        f"`pass-train evaluate`: the base model answered {first['prompts']} prompts, which nothing "
        f"was trained on, with at most {first['tokens']} tokens, and drafts were made at every "
        f"place, L = {first['lookahead']}."
    )
    return (
        "\n".join(["| " + " | ".join(line) + " |" for line in lines])
        + f"\n\n{about}\n{EXPLANATION}"
    )
