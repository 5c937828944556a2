"""Shows the results of `pass-train evaluate` as a table, and writes them into the weights file and
its model card (`--record`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pass_exporter.model.lookahead import read_record, record_acceptance
from pass_runtime.errors import PassError
from pass_runtime.files import read_text, write_whole
from pass_runtime.measuring.real_use import ALL_KINDS, KINDS
from pass_trainer.config import EvaluateConfig
from pass_trainer.report import CARD_FILE, replace_section

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


GREEDY_TEMPERATURE, SAMPLED_TEMPERATURE = 0.0, 0.8
"""Of the acceptance that a weights file records."""


def rows_of(report: Mapping[str, Any]) -> list[list[str]]:
    """Return rows with the columns HEADINGS. report: what `--json` writes."""
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
    if float(temperature) == 0:
        return "greedy"
    return f"T={temperature}" + (f", top-k {top_k}" if top_k else "")


def markdown(report: Mapping[str, Any]) -> str:
    """Return the table of a report in Markdown, with an explanation."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows_of(report)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    about = (
        f"`pass-train evaluate`: the base model answered {report['prompts']} prompts, which "
        f"nothing was trained on, with at most {report['tokens']} tokens, and drafts were made at "
        f"every place, L = {report['lookahead']}."
    )
    return f"{table}\n\n{about}\n{EXPLANATION}"


def check_recordable(config: EvaluateConfig) -> None:
    """Raise PassError if the results would not be those that a weights file records."""
    if config.weights is None:
        raise PassError(
            "--record needs the weights file to write to: pass-train evaluate WEIGHTS --record"
        )
    if not {GREEDY_TEMPERATURE, SAMPLED_TEMPERATURE} <= set(config.temperatures) or config.top_k:
        raise PassError(
            f"--record needs results at the temperatures {GREEDY_TEMPERATURE:g} and "
            f"{SAMPLED_TEMPERATURE:g}: give both in --temperatures, and leave --top-k out"
        )
    if set(config.kinds) != set(KINDS):
        raise PassError("--record needs results for all kinds of prompts: leave --kinds out")
    lookahead = read_record(config.weights).lookahead
    if config.lookahead != lookahead:
        raise PassError(
            f"--record needs results for all drafts of {config.weights}: add --lookahead "
            f"{lookahead}"
        )


def write_results(config: EvaluateConfig, report: dict[str, Any]) -> None:
    """Write the cumulative acceptance outside of loops into the weights file, and the table into
    the model card."""
    assert config.weights is not None
    greedy, sampled = (
        report["temperatures"][f"{t:g}"][ALL_KINDS]["chain"]
        for t in (GREEDY_TEMPERATURE, SAMPLED_TEMPERATURE)
    )
    record_acceptance(config.weights, tuple(greedy), tuple(sampled))
    card = config.weights.with_name(CARD_FILE)
    if card.is_file():
        text = replace_section(read_text(card), "acceptance", markdown(report))
        if text is not None:
            write_whole(card, text)
