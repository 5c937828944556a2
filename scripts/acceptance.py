"""Tokens per pass of the runtime on the prompts of `pass-train evaluate`, beside the tau that it predicts.

    pass-train evaluate WEIGHTS --model smollm2-135m --kinds chat,text,code --json > figures.json
    python scripts/acceptance.py build/smollm2-135m --weights-figures figures.json

Prompts, seeds, temperatures and the places that count are the same, so the two differ only where a near-tie makes one
text continue differently. A quantized bundle (int4, w8a8) writes other texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track

from pass_runtime import load
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.cli.tables import show_rows
from pass_runtime.measuring.real_use import (
    ALL,
    CORE_KINDS,
    KINDS,
    MARGIN,
    Passes,
    Prompt,
    count_passes,
    encode,
    parse_kinds,
    parse_temperatures,
    read_use,
    stretches,
)
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

PROMPTS = Path(__file__).parents[1] / "exporter" / "pass_trainer" / "prompts" / "evaluation.jsonl"
PLANS = ("two-pass", "fused")
"""Those that `pass-train evaluate` predicts."""
Taus = dict[str, dict[str, Passes]]
"""By kind of prompt and plan."""


def passes_of(session: Session, prompt: Prompt, options: GenerateOptions, tokens: int) -> tuple[Passes, Passes]:
    """Return the passes of one answer: where they count, and where the answer repeats itself."""
    written: list[int] = []
    sizes = []
    for emitted in session.generate_ids(encode(session, prompt), options):
        written += emitted
        sizes.append(len(emitted))
    main, looping = (count_passes(sizes, where) for where in stretches(written, tokens))
    return main, looping


def measure(
    session: Session,
    prompts: Sequence[Prompt],
    temperature: float,
    top_k: int,
    lookahead: int,
    tokens: int,
    shown: Callable[[Sequence[Prompt]], Iterable[Prompt]] = iter,
    plans: Sequence[str] = PLANS,
) -> tuple[Taus, Taus]:
    """Return the sums over prompts: passes that count, and passes where answers repeat themselves."""
    kinds = [kind for kind in KINDS if any(prompt.kind == kind for prompt in prompts)]
    main, looping = ({kind: dict.fromkeys(plans, Passes()) for kind in (*kinds, ALL)} for _ in range(2))
    for prompt in shown(prompts):
        for plan in plans:
            options = GenerateOptions(
                tokens + MARGIN, SamplingParams(temperature, top_k, seed=prompt.seed), plan=plan, lookahead=lookahead
            )
            found = passes_of(session, prompt, options, tokens)
            for sums, passes in zip((main, looping), found, strict=True):
                for kind in (prompt.kind, ALL):
                    sums[kind][plan] += passes
    return main, looping


def cells(taus: dict[str, Passes], loops: dict[str, Passes], theirs: dict[str, float]) -> dict[str, str]:
    """Return tau by plan, beside the predictions of `pass-train evaluate`, and tau where answers repeat themselves."""
    row = {}
    for plan, passes in taus.items():
        row[f"tau {plan}"] = f"{passes.tau:.3f}"
        if plan in PLANS:
            row[f"tau {plan}, expected"] = f"{theirs[plan]:.3f}" if plan in theirs else "-"
    return row | {"tau in loops": " ".join(f"{loops[plan].tau:.2f}" if loops[plan].passes else "-" for plan in taus)}


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), default=PROMPTS, help="JSON lines: id, kind, prompt.")
@click.option("--kinds", default=",".join(CORE_KINDS), show_default=True, help="Which prompts of those.")
@click.option("--plan", "plans", multiple=True, default=PLANS, show_default=True, help="Repeatable.")
@click.option("--each", type=click.IntRange(1), help="Prompts of each kind.  [default: all]")
@click.option("--tokens", type=click.IntRange(2), default=128, show_default=True, help="The longest answer.")
@click.option("--temperatures", default="0,0.8,1.0", show_default=True)
@click.option("--top-k", default=0, show_default=True)
@click.option("--lookahead", default=4, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=0, show_default=True)
@click.option("--weights-figures", type=click.Path(exists=True, path_type=Path), help="The output of evaluate --json.")
@one_line_errors
def main(
    bundle: Path,
    prompts: Path,
    kinds: str,
    plans: tuple[str, ...],
    each: int | None,
    tokens: int,
    temperatures: str,
    top_k: int,
    lookahead: int,
    device: str,
    threads: int,
    weights_figures: Path | None,
) -> None:
    """Print tau by temperature and kind of prompt."""
    expected = json.loads(weights_figures.read_text())["temperatures"] if weights_figures is not None else {}
    rows, texts, console = [], read_use(prompts, parse_kinds(kinds), each), Console(stderr=True)
    with load(bundle, device, threads=threads) as session:
        for temperature in parse_temperatures(temperatures):
            name = f"{temperature:g}"
            shown = partial(track, description=f"temperature {name}", console=console, transient=True)
            main, looping = measure(session, texts, temperature, top_k, lookahead, tokens, shown, plans)
            for kind, taus in main.items():
                theirs = expected.get(name, {}).get(kind, {}).get("tau", {})
                rows.append({"temperature": name, "prompts": kind, **cells(taus, looping[kind], theirs)})
    show_rows("tokens per pass", rows, left=rows[0])


if __name__ == "__main__":
    main()
