"""What a pass costs by window width and KV capacity, and whether tokens/s follow from that.

    python scripts/cost_model.py build/smollm2-135m --prompt-file prompts.jsonl

First table: the trunk's milliseconds (medians) by rows and capacity. Second table, greedy, for each plan: tokens/s
predicted as tau / seconds of its passes, from the pass times that `--plan auto` measures and the tau that was seen,
against tokens/s measured in the same run; what its passes cost on average in passes of `ar`; and the tau that would
make it GOAL times as fast as `ar`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import click

from pass_runtime import GenerateOptions, Session, load
from pass_runtime.backends.base import PassKind
from pass_runtime.bundle.plan import Plan, ar_plan, make_cycle
from pass_runtime.decode.runner import Runner
from pass_runtime.testing.lossless import run_tokens
from pass_runtime.tuning.pass_times import measure, probe_plans

WIDTHS = (1, 2, 3, 5, 9, 13, 25)
CAPACITIES = (256, 512, 1024, 2048)
GOAL = 1.15
PLANS = ("ar", "two-pass", "fused", "fused:4,3,2,2,1", "fused:3,2,1,1", "fused:2,1,1", "fused:1,1", "fused:1,0")


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--prompt-file", type=click.Path(exists=True, path_type=Path), help='.jsonl with {"prompt": text}.')
@click.option("--tokens", default=96, show_default=True, help="For each prompt.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=0, help="0 is the engine's default.")
def main(bundle: Path, prompt_file: Path | None, tokens: int, rounds: int, threads: int) -> None:
    """Print both tables in Markdown."""
    session = load(bundle, "cpu", threads=threads)
    lines = prompt_file.read_text(encoding="utf-8").splitlines() if prompt_file else []
    texts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    prompts = [session.encode(text) for text in texts or ["The history of the Roman Empire begins with"]]
    idle = Runner(load(bundle, "cpu", threads=threads).backend)  # passes that are only timed need slots of their own
    print_capacities(idle, rounds)
    print()
    print_predictions(session, idle, prompts, tokens, rounds)


def time_pass(idle: Runner, plan: Plan) -> tuple[float, float]:
    """Seconds of trunk and greedy tail."""
    return idle.idle_pass(PassKind(plan, 1, "greedy"))


def print_capacities(idle: Runner, rounds: int) -> None:
    print("| rows | " + " | ".join(f"S={capacity}" for capacity in CAPACITIES) + " |")
    print("|---" * (1 + len(CAPACITIES)) + "|")
    times: dict[int, dict[int, float]] = {}
    for capacity in CAPACITIES:
        idle.backend.resize(capacity, [0])
        seconds: dict[int, list[float]] = {width: [] for width in WIDTHS}
        for _ in range(3 * rounds):
            for width in WIDTHS:
                seconds[width].append(time_pass(idle, _window(width))[0])
        times[capacity] = {width: statistics.median(values) for width, values in seconds.items()}
    for width in WIDTHS:
        print(f"| {width} | " + " | ".join(f"{1e3 * times[capacity][width]:.1f}" for capacity in CAPACITIES) + " |")


def _window(width: int) -> Plan:
    """A window of `width` rows that the bundle has a tail for."""
    shapes = {1: "ar", 9: "fused:2,2,2", 13: "fused:4,2,1,1,0", 25: "fused:4,4,4,4,4"}
    if width in shapes:
        return make_cycle(shapes[width], 4).plans[0]
    return make_cycle("two-pass", width - 1).plans[1]


def print_predictions(session: Session, idle: Runner, prompts: list[list[int]], tokens: int, rounds: int) -> None:
    """Passes are timed with the cache as long as the texts need it."""
    capabilities = session.backend.capabilities
    idle.backend.resize(capabilities.capacity(max(map(len, prompts)) + tokens), [0])
    print(f"| plan | tau | predicted tokens/s | measured tokens/s | measured / predicted | cost | tau for {GOAL} |")
    print("|---|---|---|---|---|---|---|")
    rows: dict[str, list[tuple[float, float, float, float]]] = {plan: [] for plan in PLANS}
    for number in range(rounds + 1):  # the first round warms up; passes are timed anew in every round
        plans = probe_plans(session.manifest.lookahead.length)
        times = measure(lambda plan: time_pass(idle, plan), plans)
        for name in PLANS:
            options = GenerateOptions(max_new_tokens=tokens, plan=name, ignore_eos=True)
            stats = [run_tokens(session, prompt, options).stats for prompt in prompts]
            tau = sum(s.emitted for s in stats) / sum(s.passes for s in stats)
            cycle = make_cycle(name, session.manifest.lookahead.length).plans
            seconds = sum(times.plan_seconds(plan) for plan in cycle) / len(cycle)
            predicted, cost = tau / seconds, seconds / times.plan_seconds(ar_plan())
            measured = sum(s.emitted for s in stats) / sum(s.decode_seconds for s in stats)
            if number:
                rows[name].append((tau, predicted, measured, cost))
    for name, values in rows.items():
        tau, predicted, measured, cost = (statistics.median(column) for column in zip(*values, strict=True))
        ratio = statistics.median(b / a for _, a, b, _ in values)
        print(
            f"| {name} | {tau:.2f} | {predicted:.1f} | {measured:.1f} | {ratio:.2f} | {cost:.2f} | {GOAL * cost:.2f} |"
        )


if __name__ == "__main__":
    main()
