"""Writes the files beside the weights of a run: metrics.json, curves.png and the model card."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pass_exporter.model.lookahead import FILE_NAME, TrainingRecord
from pass_runtime.files import replacing, write_whole
from pass_trainer.checkpoint import History
from pass_trainer.held_out import Agreement

METRICS_FILE, CURVES_FILE, CARD_FILE = "metrics.json", "curves.png", "README.md"
SMOOTHING_FACTOR = 0.98
"""The weight of the mean so far in the moving average of the loss."""


def write_report(
    directory: Path, record: TrainingRecord, history: History, agreement: Agreement
) -> None:
    """Write the three files, each atomically."""
    metrics = {
        "training": record.model_dump(),
        "held_out": agreement.as_json(),
        "evaluations": history.evaluations,
        "loss": [round(loss, 4) for loss in history.loss],
    }
    write_whole(directory / METRICS_FILE, json.dumps(metrics) + "\n")
    draw_curves(directory / CURVES_FILE, history)
    write_whole(directory / CARD_FILE, card(record, agreement))


def draw_curves(path: Path, history: History) -> None:
    """Plot the loss, and each draft's agreement on held-out sequences, over optimizer steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(history.loss, color="0.85", linewidth=0.6, label="step")
    left.plot(smooth(history.loss), color="C0", label="smoothed")
    left.set(xlabel="step", ylabel="loss per anchor", title="Training loss")
    left.legend()
    steps = [evaluation["step"] for evaluation in history.evaluations]
    lookahead = len(history.evaluations[-1]["match"]) if history.evaluations else 0
    for draft in range(lookahead):
        shares = [evaluation["match"][draft] for evaluation in history.evaluations]
        right.plot(steps, shares, marker="o", markersize=3, label=f"draft {draft + 1}")
    right.set(
        xlabel="step", ylabel="greedy agreement", title="Drafts, held-out sequences", ylim=(0, None)
    )
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    with replacing(path) as file:
        figure.savefig(file, dpi=110, format="png")
    pyplot.close(figure)


def smooth(values: list[float]) -> list[float]:
    """Return the exponential moving average of `values`, with bias correction as in Adam."""
    mean, weight, averages = 0.0, 0.0, []
    for value in values:
        mean = SMOOTHING_FACTOR * mean + (1 - SMOOTHING_FACTOR) * value
        weight = SMOOTHING_FACTOR * weight + (1 - SMOOTHING_FACTOR)
        averages.append(mean / weight)
    return averages


def replace_section(text: str, name: str, content: str) -> str | None:
    """Return `text` with `content` between <!-- name --> and the next <!-- end -->; None if it has
    no such section."""
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
    text, replaced = re.subn(
        pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, count=1, flags=re.S
    )
    return text if replaced else None


def card(record: TrainingRecord, agreement: Agreement) -> str:
    """Return the model card in Markdown. `pass-train evaluate --record` fills its first section."""
    settings = record.recipe
    adapter = f", {record.adapter} rank {record.rank}" if record.adapter != "none" else ""
    head = f", draft head rank {record.head_rank}" if record.head_rank else ""
    rows = "\n".join(
        f"| {i + 1} | {match:.3f} | {top4:.3f} | {cumulative:.3f} |"
        for i, (match, top4, cumulative) in enumerate(
            zip(agreement.match, agreement.top4, agreement.cumulative, strict=True)
        )
    )
    tau = agreement.tau()
    return f"""# Look-ahead weights for {record.base}

`{FILE_NAME}`: {record.lookahead} look-ahead rows{adapter}{head}, {record.steps} steps.
The base model is frozen; output with these weights is the base model's own, token for token.

## Drafts in real use

<!-- acceptance -->
Not measured yet. This command puts its table here:
`pass-train evaluate {FILE_NAME} --model MODEL --lookahead {record.lookahead} --record`
<!-- end -->

## Held-out sequences

How often drafts agree with the base model's greedy choice, measured after {agreement.places} tokens
of sequences that were not trained on (their documents may have been). Small models' greedy text
repeats itself, which makes drafting easy. Top-1: the draft is the choice. Top-4: the choice is
among the draft's four most likely tokens. Cumulative: this draft and all before it are the choices.

| draft | top-1 | top-4 | cumulative |
|---|---|---|---|
{rows}

Expected tokens per pass: two-pass {tau["two-pass"]:.2f}, fused {tau["fused"]:.2f}.

![curves]({CURVES_FILE})

## Training

The base model continued prompts from {", ".join(settings["data"])}
(SHA-256 of all text {settings["data_sha256"][:16]}):
{settings["sequences"]} sequences of up to {settings["recipe"]["length"]} tokens at temperatures
{", ".join(map(str, settings["recipe"]["temperatures"]))}. Loss: `--aim {settings["aim"]}`,
each draft weighs {settings["decay"]} times as much as the one before it;
{settings["anchors"]} anchors per sequence, {settings["batch"]} sequences per step and process,
learning rate {settings["lr"]}, seed {settings["seed"]}, {settings["dtype"]}.
Versions: {", ".join(f"{name} {number}" for name, number in record.tools.items())}.
"""
