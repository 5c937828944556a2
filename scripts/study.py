"""The paper's study on SmolLM2: the gain of trained look-ahead rows by look-ahead length, text and sampling.

    python scripts/study.py --corpus build/corpus/held-out --weights models/smollm2-135m --output models/smollm2-135m

Two-pass and fused decoding (with full groups) against plain decoding of the same bundle, L = 1..8, on held-out
Wikipedia and HumanEval prompts, greedy and with top-k 10 at T = 0.8; the embeddings alone, and with their adapter and
head. `pass-run bench` measures everything, with plans in alternation. The script writes study.json, study.png,
and the model card.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import matplotlib

from pass_runtime.cli.prompt_io import read_lines
from pass_trainer.report import with_section

matplotlib.use("agg")
from matplotlib import pyplot

MODEL, LOOKAHEAD = "smollm2-135m", 8
KINDS = {"adapter and head": "lookahead.safetensors", "embeddings": "embeddings-only/lookahead.safetensors"}
CYCLES = ("two-pass", "fused")
TEXTS = {"text": "wikipedia.jsonl", "code": "humaneval.jsonl"}
SAMPLING = {"greedy": [], "top-k 10, T=0.8": ["--temperature", "0.8", "--top-k", "10", "--seed", "1"]}
PROMPT_CHARACTERS = 400


@click.command()
@click.option("--corpus", type=click.Path(exists=True, path_type=Path), required=True, help="Held-out text.")
@click.option("--weights", type=click.Path(exists=True, path_type=Path), required=True, help="A directory.")
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/study"), show_default=True)
@click.option("--kind", "kinds", multiple=True, type=click.Choice([*KINDS]), help="Of weights.  [default: all]")
@click.option("--format", "weight_format", default="w8a8", show_default=True, help="As pass-export --weights; or fp32.")
@click.option("--prompts", default=12, show_default=True, help="For each kind of text.")
@click.option("--tokens", default=32, show_default=True, help="For each prompt.")
@click.option("--repeat", default=3, show_default=True)
def main(
    corpus: Path,
    weights: Path,
    output: Path,
    work: Path,
    kinds: tuple[str, ...],
    weight_format: str,
    prompts: int,
    tokens: int,
    repeat: int,
) -> None:
    """Export, measure, draw and write. Measurements that exist in WORK are not repeated."""
    work.mkdir(parents=True, exist_ok=True)
    files = {name: write_prompts(corpus / file, work / f"{name}.jsonl", prompts) for name, file in TEXTS.items()}
    results: dict[str, Any] = {}
    for kind in kinds or KINDS:
        bundle = export(work / kind.replace(" ", "-"), weights / KINDS[kind], weight_format)
        for text, prompt_file in files.items():
            for sampling, flags in SAMPLING.items():
                target = work / f"{bundle.name}-{text}-{'greedy' if not flags else 'sampled'}.json"
                if not target.is_file():
                    bench(bundle, prompt_file, flags, tokens, repeat, target)
                results.setdefault(text, {}).setdefault(sampling, {})[kind] = json.loads(target.read_text())
    output.mkdir(parents=True, exist_ok=True)
    (output / "study.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, output / "study.png")
    machine = next(iter(results["text"]["greedy"].values()))["machine"]
    setting = (
        f"{weight_format}, {prompts} prompts of each kind, {tokens} tokens each, medians of {repeat} rounds, {machine}."
    )
    write_card(output / "README.md", {"study": f"{table(results)}\n\n{setting}", "held-out": held_out(corpus)})


def run(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", *map(str, arguments)], stdout=subprocess.DEVNULL, check=True)


def write_prompts(source: Path, target: Path, count: int) -> Path:
    """Write the beginnings of `count` documents, spread over the file, as prompts."""
    texts = [line.object()["text"] for line in read_lines(source)]
    chosen = [texts[i * len(texts) // count] for i in range(count)]
    target.write_text("".join(json.dumps({"prompt": text[:PROMPT_CHARACTERS].rstrip()}) + "\n" for text in chosen))
    return target


def export(bundle: Path, weights: Path, weight_format: str) -> Path:
    if not (bundle / "pass_config.json").is_file():
        rounded = () if weight_format == "fp32" else ("--weights", weight_format)
        flags = ("--lookahead", LOOKAHEAD, "--lookahead-weights", weights, *rounded, "-o", bundle)
        run("pass_exporter.cli", "--model", MODEL, *flags)
    return bundle


def bench(bundle: Path, prompts: Path, flags: list[str], tokens: int, repeat: int, target: Path) -> None:
    lookahead = [flag for length in range(1, LOOKAHEAD + 1) for flag in ("--lookahead", length)]
    plans = [flag for plan in ("ar", *CYCLES) for flag in ("--plan", plan)]
    counts = ("--max-new-tokens", tokens, "--repeat", repeat, "-o", target)
    run("pass_runtime.cli.main", "bench", bundle, "--prompt-file", prompts, *plans, *lookahead, *flags, *counts)


def lengths_of(cycle: str, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of one cycle for L = 1..8."""
    return [plan for plan in report["plans"] if plan["plan"].startswith(cycle)]


def draw(results: dict[str, Any], path: Path) -> None:
    figure, grid = pyplot.subplots(2, 4, figsize=(14, 6), layout="constrained", sharex=True)
    columns = [(text, sampling) for text in TEXTS for sampling in SAMPLING]
    lengths = range(1, LOOKAHEAD + 1)
    for column, (text, sampling) in enumerate(columns):
        for kind, report in results[text][sampling].items():
            for cycle, style in zip(CYCLES, ("--", "-"), strict=True):
                for row, figure_name in enumerate(("tau", "ratio")):
                    values = [plan[figure_name] for plan in lengths_of(cycle, report)]
                    label, colour = f"{kind}, {cycle}", f"C{[*KINDS].index(kind)}"
                    grid[row][column].plot(lengths, values, style, color=colour, marker="o", markersize=3, label=label)
        grid[0][column].set(title=f"{text}, {sampling}")
        grid[1][column].set(xlabel="look-ahead L")
        for row in (0, 1):
            grid[row][column].axhline(1, color="0.6", linewidth=0.8)
            grid[row][column].grid(alpha=0.3)
    for row, label in enumerate(("tau: tokens per pass", "speed relative to ar")):
        limits = [axes.get_ylim() for axes in grid[row]]
        for axes in grid[row]:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        grid[row][0].set_ylabel(label)
    grid[0][0].legend()
    figure.savefig(path, dpi=110)


def table(results: dict[str, Any]) -> str:
    lengths = " | ".join(f"L={i}" for i in range(1, LOOKAHEAD + 1))
    lines = [f"| text | sampling | weights | cycle | {lengths} |", "|---" * (4 + LOOKAHEAD) + "|"]
    for text, samplings in results.items():
        for sampling, kinds in samplings.items():
            for kind, cycle in itertools.product(kinds, CYCLES):
                cells = [f"{plan['tau']:.2f} / {plan['ratio']:.2f}" for plan in lengths_of(cycle, kinds[kind])]
                lines.append(f"| {' | '.join([text, sampling, kind, cycle, *cells])} |")
    return "\n".join(lines)


def held_out(corpus: Path) -> str:
    """Return the names of all documents that were not trained on."""
    lines = []
    for file in sorted(corpus.glob("*.jsonl")):
        names = [line.object()["name"] for line in read_lines(file)]
        lines += ["<details>", f"<summary>{file.stem}: {len(names)}</summary>", "", ", ".join(names), "", "</details>"]
    return "\n".join(lines)


def write_card(card: Path, sections: dict[str, str]) -> None:
    """Replace every section of the model card by its new content."""
    text = card.read_text(encoding="utf-8")
    for name, content in sections.items():
        written = with_section(text, name, content)
        if written is None:
            raise click.ClickException(f"{card} has no section <!-- {name} --> ... <!-- end -->")
        text = written
    card.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
