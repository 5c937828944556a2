"""`pass-train evaluate --record`: writes results into the weights file and its model card."""

from __future__ import annotations

from typing import Any

from pass_exporter.model.lookahead import read_record, record_acceptance
from pass_runtime.errors import PassError
from pass_runtime.files import read_text, write_whole
from pass_runtime.measuring.real_use import ALL_KINDS, KINDS
from pass_trainer.evaluation.evaluate import EvaluateConfig
from pass_trainer.evaluation.table import markdown
from pass_trainer.report import CARD_FILE, replace_section

GREEDY_TEMPERATURE, SAMPLED_TEMPERATURE = 0.0, 0.8
"""A weights file records the acceptance at these two temperatures."""


def check_recordable(config: EvaluateConfig) -> None:
    """Raise PassError if the options do not give the results that a weights file records."""
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
    """Write the cumulative acceptance outside of loops, over all prompts, into the weights file,
    and the table into the model card, if it has a section for it."""
    assert config.weights is not None
    greedy, sampled = (
        report["temperatures"][f"{t:g}"][ALL_KINDS]["chain"]
        for t in (GREEDY_TEMPERATURE, SAMPLED_TEMPERATURE)
    )
    record_acceptance(config.weights, tuple(greedy), tuple(sampled))
    card = config.weights.with_name(CARD_FILE)
    if card.is_file():
        text = replace_section(read_text(card), "acceptance", markdown({"": report}))
        if text is not None:
            write_whole(card, text)
