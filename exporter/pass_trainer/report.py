"""Writes the files beside the weights of a run: metrics, curves and the model card (card.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from pass_exporter.model.lookahead import TrainingRecord
from pass_runtime.files import replacing, write_whole
from pass_trainer.checkpoint import History
from pass_trainer.held_out import Agreement

METRICS_FILE, CURVES_FILE, CARD_FILE = "metrics.json", "curves.png", "README.md"
CARD_TEMPLATE = Path(__file__).with_name("card.md")
SMOOTHING_FACTOR = 0.98


def write_report(
    directory: Path, record: TrainingRecord, history: History, agreement: Agreement
) -> None:
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
    """Return the exponential moving average, with bias correction as in Adam."""
    mean, weight, averages = 0.0, 0.0, []
    for value in values:
        mean = SMOOTHING_FACTOR * mean + (1 - SMOOTHING_FACTOR) * value
        weight = SMOOTHING_FACTOR * weight + (1 - SMOOTHING_FACTOR)
        averages.append(mean / weight)
    return averages


def replace_section(text: str, name: str, content: str) -> str | None:
    """Replace what is between <!-- name --> and the next <!-- end -->; None without such a
    section."""
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
    text, replaced = re.subn(
        pattern, lambda match: f"{match[1]}{content}\n{match[2]}", text, count=1, flags=re.S
    )
    return text if replaced else None


def card(record: TrainingRecord, agreement: Agreement) -> str:
    """Return the model card in Markdown. `pass-train evaluate --record` fills its first section."""
    shares = zip(agreement.match, agreement.top4, agreement.cumulative, strict=True)
    settings = record.recipe
    return CARD_TEMPLATE.read_text(encoding="utf-8").format(
        record=record,
        settings=settings,
        places=agreement.places,
        rows="\n".join(
            f"| {draft} | {match:.3f} | {top4:.3f} | {cumulative:.3f} |"
            for draft, (match, top4, cumulative) in enumerate(shares, 1)
        ),
        tau=agreement.tau(),
        data=", ".join(settings["data"]),
        temperatures=", ".join(map(str, settings["recipe"]["temperatures"])),
        versions=", ".join(f"{name} {number}" for name, number in record.tools.items()),
    )
