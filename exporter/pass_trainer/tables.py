"""A report of `pass-train evaluate` as a table, for terminals and model cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADINGS = (
    "decoding",
    "prompts",
    "places",
    "drafts 1..L survive",
    "accepted",
    "tau two-pass",
    "tau fused",
    "in loops",
    "accepted there",
)
MEANING = """A place is a token of the model's answer behind which drafts were made. "Survive" is the rate at which
draft j is right where those before it were; "accepted" counts drafts right in a row, and tau tokens per pass.
Places in a loop, where the model repeats itself, are in the last two columns only."""


def rows_of(report: Mapping[str, Any]) -> list[list[str]]:
    """A row under HEADINGS for every temperature and kind; report: as `--json` prints it."""
    return [
        [
            decoding(temperature, report["top_k"]),
            kind,
            str(found["places"]),
            " ".join(f"{value:.2f}" for value in found["survival"]),
            f"{found['accepted']:.2f}",
            f"{found['tau']['two-pass']:.2f}",
            f"{found['tau']['fused']:.2f}",
            f"{100 * found['looping']['share']:.0f} %",
            f"{found['looping']['accepted']:.2f}" if found["looping"]["places"] else "-",
        ]
        for temperature, kinds in report["temperatures"].items()
        for kind, found in kinds.items()
    ]


def decoding(temperature: str, top_k: int) -> str:
    """Greedy, or how it was sampled."""
    if float(temperature) == 0:
        return "greedy"
    return f"T={temperature}" + (f", top-k {top_k}" if top_k else "")


def markdown(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables of several weights, or of one, as one in Markdown, with what it means. Keys name the weights: they are
    a column where there are several."""
    named = len(reports) > 1
    first = next(iter(reports.values()))
    headings = (*(["weights"] if named else []), *HEADINGS)
    rows = [[*([name] if named else []), *row] for name, report in reports.items() for row in rows_of(report)]
    lines = [headings, ["---"] * len(headings), *rows]
    about = (
        f"`pass-train evaluate`: the base model answered {first['prompts']} prompts, which nothing was trained on, in "
        f"{first['tokens']} tokens at most, and drafts were made at every place, L = {first['lookahead']}."
    )
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines]) + f"\n\n{about}\n{MEANING}"
