"""Tokens per second with several clients, with drafts and without.

    python scripts/clients_speed.py build/smollm2-135m-w8a8 --threads 2

One session, whose clients send prompts of `pass-train evaluate` (chat through the chat template, text, code, in turn),
each its next one after the answer to the last; prompts are read every time. With drafts it is the plan `auto`, without
`ar`. In a round each number of clients runs both, one after the other and in the other order in the next round; the
ratio is the median of the rounds' ratios. One run before them lets `auto` time its passes. Nothing else should run
meanwhile.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import click
from acceptance import PROMPTS

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.cli.bench import write_json
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.cli.tables import show_rows
from pass_runtime.measuring.real_use import CORE_KINDS, encode, read_use

PLANS = {"off": "ar", "on": "auto"}


def tokens_per_second(session: Session, prompts: Sequence[list[int]], options: GenerateOptions, clients: int) -> float:
    """While so many clients work through `prompts`."""
    with ThreadPoolExecutor(clients) as pool:
        started = perf_counter()
        written = sum(pool.map(lambda ids: len(session.generate_ids(ids, options).result().token_ids), prompts))
        return written / (perf_counter() - started)


@click.command(help=(__doc__ or "").split("\n\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--clients", multiple=True, type=click.IntRange(1), default=(1, 4, 8, 16), show_default=True)
@click.option("--requests", default=24, show_default=True, help="Of a run; at least two for each client.")
@click.option("--tokens", default=96, show_default=True, help="The longest answer.")
@click.option("--temperature", "temperatures", multiple=True, type=float, default=(0.0, 0.8), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", default=0, help="[default: the engine's choice]")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON, too.")
@one_line_errors
def main(
    bundle: Path,
    clients: tuple[int, ...],
    requests: int,
    tokens: int,
    temperatures: tuple[float, ...],
    rounds: int,
    threads: int,
    output: Path | None,
) -> None:
    by_kind = [[prompt for prompt in read_use(PROMPTS) if prompt.kind == kind] for kind in CORE_KINDS]
    rows, figures = [], []
    with load(bundle, "cpu", threads=threads, max_batch_size=max(clients), prefix_cache=False) as session:
        mixed = [encode(session, prompt) for prompts in zip(*by_kind, strict=False) for prompt in prompts]
        for temperature in temperatures:
            sampling = SamplingParams(temperature, seed=1)
            session.warm_up(sampling)
            for count in clients:
                used = (mixed * 8)[: max(requests, 2 * count)]
                options = {
                    name: GenerateOptions(max_new_tokens=tokens, plan=plan, sampling=sampling)
                    for name, plan in PLANS.items()
                }
                tokens_per_second(session, used[:count], options["on"], count)
                found: dict[str, list[float]] = {name: [] for name in PLANS}
                for number in range(rounds):
                    for name in list(PLANS)[:: -1 if number % 2 else 1]:
                        found[name].append(tokens_per_second(session, used, options[name], count))
                ratios = [on / off for on, off in zip(found["on"], found["off"], strict=True)]
                figures.append({"temperature": temperature, "clients": count, **found, "ratios": ratios})
                rows.append(
                    {
                        "T": f"{temperature:g}",
                        "clients": f"{count}",
                        **{name: f"{statistics.median(speeds):.1f}" for name, speeds in found.items()},
                        "ratio": f"{statistics.median(ratios):.2f}",
                        "of the rounds": " ".join(f"{ratio:.2f}" for ratio in ratios),
                    }
                )
                click.echo(f"T={temperature:g}, {count} clients: {rows[-1]['of the rounds']}", err=True)
    show_rows(f"tokens per second, drafts off and on: {bundle.name}", rows)
    write_json({"bundle": bundle.name, "threads": threads, "tokens": tokens, "runs": figures}, output)


if __name__ == "__main__":
    main()
