"""pass-run bench: times plans against each other on the same prompts. The plans take turns, so that
noise of the machine affects all alike."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import click
from rich.console import Console
from rich.progress import track

from pass_runtime.bundle.option import option, options_class
from pass_runtime.bundle.plan import PLAN_NAMES
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli import flags as opts
from pass_runtime.cli.bench_rows import RowsOptions, SaveReport, measure_rows, print_rows
from pass_runtime.cli.prompt_io import read_prompts
from pass_runtime.cli.tables import print_plans
from pass_runtime.commands.errors import OneLineCommand, one_line_errors, require
from pass_runtime.decode.stats import Stats
from pass_runtime.files import to_json, write_whole
from pass_runtime.measuring.lossless import first_difference, loop_start, run_tokens
from pass_runtime.measuring.real_use import FIRST_LOOK_PROMPTS, encode, in_turns, read_prompt_set
from pass_runtime.options import DraftSource, GenerateOptions, LoadOptions
from pass_runtime.packages import installed
from pass_runtime.session import Session

DEFAULT_CONTENDERS: Mapping[str, Mapping[str, str]] = {
    "ar": {"plan": "ar"},
    "auto (lookahead)": {"plan": "auto", "draft": "lookahead"},
    "auto": {"plan": "auto"},
}
"""What is compared by default: options of a request, by the name in the tables."""
MAX_LABEL_CHARS = 32


@options_class
class BenchOptions:
    """What to compare: all combinations of plans, drafts and lookahead. batches: how many sequences
    run together; () runs them one by one."""

    label_prefix: ClassVar[str] = "--"
    sampling: SamplingParams
    prompts: Sequence[str] = option(
        (), "A prompt, without a chat template. Without any: nine prompts.", flag="-p --prompt"
    )
    prompt_file: Path | None = option(None, '.jsonl with {"prompt": text} on each line.')
    max_new_tokens: int = option(48, "Tokens per prompt; EOS is ignored.")
    plans: Sequence[str] = option(
        (), "Plans to compare; ratios are to the first. Without any: see above.", flag="--plan"
    )
    drafts: Sequence[DraftSource] = option((), "Draft sources to compare.", flag="--draft")
    lookahead: Sequence[int] = option(
        (), "The most drafts of a pass. Without any: L, and up to 16 for copies."
    )
    repeat: int = option(3, "Rounds; every round runs every plan once.", ge=1)
    batches: Sequence[int] = ()

    def encoded(self, session: Session) -> dict[str, list[int]]:
        """Return the token ids of the prompts, by the labels that the prompts have in tables."""
        if self.prompts or self.prompt_file:
            texts = (*self.prompts, *(read_prompts(self.prompt_file) if self.prompt_file else ()))
            return {
                _label(str(number), text): session.encode(text)
                for number, text in enumerate(texts, 1)
            }
        prompts = read_prompt_set(FIRST_LOOK_PROMPTS)
        return {_label(prompt.id, prompt.text): encode(session, prompt) for prompt in prompts}


def _label(name: str, text: str) -> str:
    label = " ".join(f"{name}: {text}".split())
    return label if len(label) <= MAX_LABEL_CHARS else f"{label[: MAX_LABEL_CHARS - 3]}..."


@dataclass(frozen=True)
class TimedRun:
    """What a plan did with prompts that were submitted together. seconds: as `Contender` counts."""

    token_ids: list[list[int]]
    stats: list[Stats]
    seconds: float

    @property
    def token_count(self) -> int:
        return sum(stats.generated_tokens for stats in self.stats)


def tokens_per_second(runs: Sequence[TimedRun]) -> float:
    return sum(run.token_count for run in runs) / sum(run.seconds for run in runs)


@dataclass
class Contender:
    """A plan in the comparison. batch: how many prompts run together, timed with prefill; None:
    they run one by one, and only decoding is timed. rounds: the runs of each round."""

    name: str
    options: GenerateOptions
    batch: int | None = None
    rounds: list[list[TimedRun]] = field(default_factory=list)

    def run(self, session: Session, prompts: Sequence[list[int]]) -> TimedRun:
        started = time.perf_counter()
        if self.batch is None:
            streams = [run_tokens(session, prompt, self.options) for prompt in prompts]
            seconds = sum(stream.stats.decode_seconds for stream in streams)
        else:
            generations = [session.generate_ids(ids, self.options) for ids in prompts]
            streams = [generation.result() for generation in generations]
            seconds = time.perf_counter() - started
        return TimedRun([s.token_ids for s in streams], [s.stats for s in streams], seconds)

    @property
    def token_ids(self) -> list[list[int]]:
        """The token ids for each prompt in the first round."""
        return [ids for run in self.rounds[0] for ids in run.token_ids]

    def as_dict(self, baseline: Contender, labels: Sequence[str]) -> dict[str, Any]:
        """Return the plan's entry in the report. labels: of the prompts."""
        stats_by_round = [[stats for run in runs for stats in run.stats] for runs in self.rounds]
        # `auto` may need other passes for the same text.
        sums = [sum_stats(parts) for parts in stats_by_round]
        total = sum_stats(sums)
        decode = [sum(stats.decode_seconds for stats in parts) for parts in stats_by_round]
        host = [sum(stats.host_seconds for stats in parts) for parts in stats_by_round]

        def milliseconds_per_pass(seconds: Sequence[float]) -> float:
            rounds = zip(seconds, sums, strict=True)
            return 1e3 * statistics.median(s / stats.passes for s, stats in rounds)

        entry: dict[str, Any] = {
            "plan": self.name,
            "batch": self.batch,
            **self._speed(baseline, slice(None)),
            "tokens_per_second_each": statistics.median(
                stats.generated_tokens / s for s, stats in zip(decode, sums, strict=True)
            ),
            "milliseconds_per_pass": milliseconds_per_pass(decode),
            "host_milliseconds_per_pass": milliseconds_per_pass(host),
            "tau": total.tau,
            "mean_acceptance_length": total.mean_acceptance_length,
            "draft_acceptance_rate": total.draft_acceptance_rate,
            "acceptance_per_position": total.acceptance_per_position,
            "acceptance_of_tried": total.acceptance_of_tried,
        }
        if self.batch is None:
            entry["by_prompt"] = [
                {
                    "prompt": label,
                    **self._speed(baseline, slice(i, i + 1)),
                    "tau": sum_stats([runs[i].stats[0] for runs in self.rounds]).tau,
                }
                for i, label in enumerate(labels)
            ]
        return entry

    def _speed(self, baseline: Contender, part: slice) -> dict[str, float]:
        speeds = [tokens_per_second(runs[part]) for runs in self.rounds]
        baseline_speeds = [tokens_per_second(runs[part]) for runs in baseline.rounds]
        ratio = statistics.median(a / b for a, b in zip(speeds, baseline_speeds, strict=True))
        return {"tokens_per_second": statistics.median(speeds), "ratio": ratio}


def sum_stats(parts: Sequence[Stats]) -> Stats:
    total = Stats(plan=parts[0].plan, lookahead=parts[0].lookahead)
    for stats in parts:
        for name in ("generated_tokens", "passes", "emitted", "steps", "drafted", "accepted"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        total.steps_by_accepted += stats.steps_by_accepted
        total.steps_by_drafted += stats.steps_by_drafted
    return total


def run_bench(
    session: Session, request: BenchOptions, save: SaveReport = lambda _report: None
) -> dict[str, Any]:
    """Time plans against each other and return the report. Prompts are repeated to fill the largest
    batch. save: gets the report after each round but the last."""
    encoded = request.encoded(session)
    prompt_count = max([len(encoded), *request.batches])
    labels = list(itertools.islice(itertools.cycle(encoded), prompt_count))
    prompts = [encoded[label] for label in labels]
    contenders = _contenders(session, request)
    if any(contender.options.plan == "auto" for contender in contenders):
        # Without this, `auto` would time passes during a round.
        session.warm_up(contenders[0].options.sampling)

    def report(comparison: Mapping[str, list[str] | None]) -> dict[str, Any]:
        return {
            "lookahead_source": session.manifest.lookahead.source,
            "prompts": len(prompts),
            "looping": sum(loop_start(ids) is not None for ids in contenders[0].token_ids),
            "max_new_tokens": request.max_new_tokens,
            "sampling": asdict(contenders[0].options.sampling),
            "repeat": len(contenders[0].rounds),
            "rule": session.manifest.rule,
            **comparison,
            "plans": [contender.as_dict(contenders[0], labels) for contender in contenders],
        }

    rounds: Iterable[dict[tuple[str, int], list[TimedRun]]] = in_turns(
        _calls(session, contenders, prompts), request.repeat
    )
    console = Console(stderr=True)
    if console.is_terminal:
        rounds = track(rounds, "bench", request.repeat, console=console, transient=True)
    for runs_by_call in rounds:  # the runs in all rounds so far
        for contender in contenders:
            by_prompt = [runs for (name, _), runs in runs_by_call.items() if name == contender.name]
            contender.rounds = [list(runs) for runs in zip(*by_prompt, strict=True)]
        if len(contenders[0].rounds) < request.repeat:
            # The texts are not compared before the end.
            save(report({"near_ties": None, "differences": None}))
    return report(_compare(session, prompts, contenders))


def _calls(
    session: Session, contenders: Sequence[Contender], prompts: Sequence[list[int]]
) -> dict[tuple[str, int], Callable[[], TimedRun]]:
    """Return the calls of a round by contender and index of the first prompt. All contenders run a
    prompt before any of them runs the next one."""
    calls: dict[tuple[str, int], Callable[[], TimedRun]] = {}
    for first in range(len(prompts)):
        for contender in contenders:
            size = contender.batch or 1
            if first % size == 0:
                calls[contender.name, first] = partial(
                    contender.run, session, prompts[first : first + size]
                )
    return calls


def about(session: Session) -> dict[str, Any]:
    """Return the fields of a report that describe the bundle and the machine."""
    packages = " and ".join(f"{name} {number}" for name, number in installed().items())
    return {
        "bundle": session.manifest.model.name,
        "dtype": session.manifest.model.dtype,
        "weights": session.manifest.model.weights,
        "device": session.backend.capabilities.device,
        "uncaptured": session.backend.uncaptured,
        "kernels": session.backend.capabilities.kernels,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {packages or 'onnxruntime'}",
    }


def write_json(report: dict[str, Any], output: Path | None) -> None:
    if output is not None:
        write_whole(output, to_json(report, indent=2) + "\n")


def show_report(
    report: dict[str, Any], print_report: Callable[..., None], *, as_json: bool, output: Path | None
) -> None:
    """Print the report, and write it to `output`. print_report: prints its tables."""
    write_json(report, output)
    if as_json:
        click.echo(to_json(report, indent=2))
    else:
        print_report(report)


def _compare(
    session: Session, prompts: list[list[int]], contenders: list[Contender]
) -> dict[str, list[str] | None]:
    """Compare the tokens of all contenders with those of the first. `near_ties` are differences
    where windows may round differently and rounding could have swapped the tokens."""
    near_ties, differences = list[str](), list[str]()
    baseline, *others = contenders
    if session.manifest.rule == "rejection" and baseline.options.sampling.temperature > 0:
        others = []  # By the rejection rule plans write different texts.
    for contender in others:
        texts = zip(prompts, contender.token_ids, baseline.token_ids, strict=True)
        for prompt, ids, baseline_ids in texts:
            difference = first_difference(session, prompt, contender.options, baseline_ids, ids)
            if difference is not None:
                allowed = difference.is_near_tie and not session.backend.capabilities.same_entries
                (near_ties if allowed else differences).append(f"{contender.name}: {difference}")
    return {"near_ties": near_ties, "differences": differences}


def _contenders(session: Session, request: BenchOptions) -> list[Contender]:
    contenders: dict[str, Contender] = {}
    sampling = request.sampling.resolved()  # one seed, so that all plans write the same text
    combinations: list[Mapping[str, Any]] = [
        {"plan": plan, "draft": None if plan == "ar" else draft, "lookahead": lookahead}
        for plan, draft, lookahead in itertools.product(
            request.plans or (*PLAN_NAMES, "auto"),
            request.drafts or (None,),
            request.lookahead or (None,),
        )
    ]
    if not (request.plans or request.drafts or request.lookahead):
        combinations = [*DEFAULT_CONTENDERS.values()]
    for batch, fields in itertools.product(request.batches or (None,), combinations):
        options = GenerateOptions(
            max_new_tokens=request.max_new_tokens, sampling=sampling, ignore_eos=True, **fields
        )
        name = contender_name(session, options) + (f" x{batch}" if batch is not None else "")
        contenders.setdefault(name, Contender(name, options, batch))
    return list(contenders.values())


def contender_name(session: Session, options: GenerateOptions) -> str:
    """Return the name of a plan with its drafts, such as `two-pass L=4` or `fused:4,2,1 +ngram`."""
    if options.plan == "auto":
        most = "" if options.lookahead is None else f" L={options.lookahead}"
        return f"auto{most}" + ("" if options.draft in (None, "both") else f" ({options.draft})")
    resolved = session.resolve(options)
    name, drafts = resolved.plan_name, resolved.lookahead_drafts or resolved.ngram_drafts
    shape = "" if ":" in name or not drafts else f" L={drafts}"
    return name.removesuffix("+ngram") + shape + (" +ngram" if name.endswith("+ngram") else "")


@click.command(cls=OneLineCommand)
@opts.BUNDLE
@opts.flags_of(BenchOptions, "prompts", "prompt_file", "max_new_tokens")
@opts.sampling_options
@opts.flags_of(BenchOptions, "plans", "drafts", "lookahead")
@click.option(
    "--batch",
    "batches",
    callback=opts.parse_sizes,
    help="Numbers of sequences to run together, as 1,2,4,8.  [default: one by one]",
)
@click.option(
    "--rows",
    callback=opts.parse_sizes,
    help="Time not plans, but single passes of windows with 1,2,3,5,9 rows, for example.",
)
@click.option(
    "--cached", type=click.IntRange(0), default=200, show_default=True, help="Tokens before --rows."
)
@opts.flags_of(BenchOptions, "repeat")
@opts.load_flags()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "-o",
    "--output",
    type=opts.PATH,
    help="Also write JSON to this file after every round.",
)
@one_line_errors
def bench(
    bundle: Path,
    rows: tuple[int, ...],
    cached: int,
    as_json: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Time plans against each other, in alternation, and report medians over rounds.

    By default the plans are plain decoding (ar), auto with look-ahead drafts only, and auto, on
    three chat, three text and three code prompts that no weights were trained on. The status is 1
    if the plans write different texts.

    Without --batch, prompts run one by one, and tokens/s is that of decoding, without prefill. With
    --batch it is that of all sequences together, with prefill. ms/pass never includes prefill. tau
    is tokens per pass.

    With --rows, every round times ten passes of each window, with and without look-ahead rows. The
    KV capacity is --capacity if given, else the smallest that holds --cached tokens and the window.
    """
    require("cpu")
    request = opts.take(BenchOptions, options, sampling=opts.take(SamplingParams, options))
    if rows:
        why = "--rows times single passes of windows"
        opts.refuse_given(why, "plans", "drafts", "lookahead", "max_new_tokens")
    else:
        opts.refuse_given("it is for --rows", "cached")
    loading = LoadOptions(
        **options, max_batch_size=max(request.batches, default=1), prefix_cache=False
    )
    session = opts.open_bundle(bundle, loading)

    def save(report: dict[str, Any]) -> None:
        write_json(about(session) | report, output)

    if rows:
        timing = RowsOptions(
            request.sampling,
            rows,
            request.batches or (1,),
            cached,
            whole_cache=loading.capacity is not None,
            repeat=request.repeat,
        )
        report = measure_rows(session, timing, request.encoded(session).values(), save)
    else:
        report = run_bench(session, request, save)
    print_report = print_rows if rows else print_plans
    show_report(about(session) | report, print_report, as_json=as_json, output=output)
    if report.get("differences"):
        sys.exit(1)
