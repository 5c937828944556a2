"""pass-run bench: compares plans on the same prompts, in alternation, so that a noisy machine affects all alike."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import onnxruntime as ort
from rich.console import Console
from rich.progress import track

from pass_runtime.bundle.plan import MODES
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.bench_breakdown import Breakdown
from pass_runtime.cli.prompts import read_prompts
from pass_runtime.cli.tables import OutputConsole, show_rows
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole
from pass_runtime.json_lines import to_json
from pass_runtime.measuring.lossless import first_difference, run_tokens
from pass_runtime.measuring.turns import in_turns
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

PROMPTS = (
    "The history of the Roman Empire begins with",
    "def quicksort(items):\n    ",
    "To bake a loaf of bread, first",
    "Photosynthesis is the process by which",
)
PLANS = (*MODES, "auto")
T = TypeVar("T")
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class BenchOptions:
    sampling: SamplingParams
    prompts: tuple[str, ...] = ()
    prompt_file: Path | None = None
    max_new_tokens: int = 64
    plans: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    lookahead: tuple[int, ...] = ()
    repeat: int = 3
    batches: tuple[int, ...] = ()
    breakdown: bool = False

    def texts(self) -> tuple[str, ...]:
        """Return the prompts of flags and file, or PROMPTS."""
        if self.prompt_file is None:
            return self.prompts or PROMPTS
        return (*self.prompts, *read_prompts(self.prompt_file))


@dataclass(frozen=True)
class Round:
    """One run of every prompt: the text and the counts of each, and the seconds that are compared."""

    texts: list[list[int]]
    stats: list[Stats]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(stats.generated_tokens for stats in self.stats)


@dataclass
class Contender:
    """A plan and its measurements. batch: sequences at a time; None is one by one, and then only decoding is timed."""

    name: str
    options: GenerateOptions
    batch: int | None = None
    rounds: list[Round] = field(default_factory=list)

    def run(self, session: Session, prompts: Sequence[list[int]]) -> Round:
        """Run one round. Each group of `batch` prompts begins together."""
        if self.batch is None:
            streams = [run_tokens(session, prompt, self.options) for prompt in prompts]
            stats = [stream.stats for stream in streams]
            return Round([s.token_ids for s in streams], stats, sum(s.decode_seconds for s in stats))
        streams, started = [], time.perf_counter()
        for first in range(0, len(prompts), self.batch):
            group = [session.generate_ids(prompt, self.options) for prompt in prompts[first : first + self.batch]]
            streams += [stream.result() for stream in group]
        seconds = time.perf_counter() - started
        return Round([s.token_ids for s in streams], [s.stats for s in streams], seconds)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of every round."""
        return [each.tokens / each.seconds for each in self.rounds]

    def as_dict(self, baseline: Contender) -> dict[str, Any]:
        total = sum_stats(self.rounds[0].stats)  # all rounds decode the same tokens
        seconds = [sum(s.decode_seconds for s in r.stats) for r in self.rounds]
        host = [sum(s.host_seconds for s in r.stats) for r in self.rounds]
        return {
            "plan": self.name,
            "batch": self.batch,
            "tokens_per_second": statistics.median(self.rates),
            "tokens_per_second_each": statistics.median(
                each.tokens / spent for each, spent in zip(self.rounds, seconds, strict=True)
            ),
            "ratio": statistics.median(a / b for a, b in zip(self.rates, baseline.rates, strict=True)),
            "milliseconds_per_pass": 1e3 * statistics.median(seconds) / total.passes,
            "host_milliseconds_per_pass": 1e3 * statistics.median(host) / total.passes,
            "tau": total.tau,
            "mean_acceptance_length": total.mean_acceptance_length,
            "draft_acceptance_rate": total.draft_acceptance_rate,
            "acceptance_per_position": total.acceptance_per_position,
        }


def sum_stats(parts: Sequence[Stats]) -> Stats:
    """Return the sums of the counts of several generations with one plan."""
    total = Stats(plan=parts[0].plan, lookahead=parts[0].lookahead)
    for stats in parts:
        for name in ("generated_tokens", "passes", "emitted", "steps", "drafted", "accepted"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        total.histogram += stats.histogram
    return total


def run_bench(session: Session, request: BenchOptions, save: Save = lambda _report: None) -> dict[str, Any]:
    """Time plans against each other and return the report, without `about`. `save` gets the report so far after each
    round but the last."""
    texts = request.texts()
    count = max(len(texts), *request.batches) if request.batches else len(texts)
    prompts = [session.encode(texts[i % len(texts)]) for i in range(count)]
    contenders = _contenders(session, request)
    if any(contender.options.plan == "auto" for contender in contenders):
        session.warm_up(contenders[0].options.sampling)  # as servers do; otherwise chance decides when sizes are timed
    breakdown = Breakdown(session, {c.name: (c.options, c.batch) for c in contenders}) if request.breakdown else None

    def entry(contender: Contender) -> dict[str, Any]:
        found = contender.as_dict(contenders[0])
        return found | (breakdown.of(contender.name, found["tau"]) if breakdown else {})

    def report(near_ties: list[str] | None) -> dict[str, Any]:
        return {
            "lookahead_source": session.manifest.lookahead.source,
            "prompts": len(prompts),
            "max_new_tokens": request.max_new_tokens,
            "sampling": asdict(contenders[0].options.sampling),
            "repeat": len(contenders[0].rounds),
            "rule": session.manifest.rule,
            "near_ties": near_ties,
            "plans": [entry(contender) for contender in contenders],
        }

    calls = {contender.name: partial(contender.run, session, prompts) for contender in contenders}
    for found in _shown(in_turns(calls, request.repeat), request.repeat):
        for contender in contenders:
            contender.rounds = found[contender.name]
        if breakdown:
            breakdown.time()
        if len(contenders[0].rounds) < request.repeat:
            save(report(None))  # the texts are compared at the end
    return report(_near_ties(session, prompts, contenders))


def _shown(rounds: Iterable[T], count: int) -> Iterable[T]:
    """Return the rounds, with a progress bar in a terminal."""
    console = Console(stderr=True)
    return track(rounds, "bench", count, console=console, transient=True) if console.is_terminal else rounds


def about(session: Session) -> dict[str, Any]:
    """Return what the report says of the bundle and the machine."""
    return {
        "bundle": session.manifest.model.name,
        "dtype": session.manifest.model.dtype,
        "weights": session.manifest.model.weights,
        "device": session.backend.capabilities.device,
        "uncaptured": session.backend.uncaptured,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, onnxruntime {ort.__version__}",
    }


def write_json(report: dict[str, Any], output: Path | None) -> None:
    """Write the report to `output`, beside its place and renamed."""
    if output is not None:
        write_whole(output, to_json(report, indent=2) + "\n")


def show_report(
    report: dict[str, Any], print_report: Callable[[dict[str, Any]], None], *, as_json: bool, output: Path | None
) -> None:
    """Print a table or JSON, and write JSON to `output`."""
    write_json(report, output)
    if as_json:
        click.echo(to_json(report, indent=2))
    else:
        print_report(report)


def _near_ties(session: Session, prompts: list[list[int]], contenders: list[Contender]) -> list[str]:
    """Check that all plans wrote the same text, and return the differences that are near-ties."""
    near_ties = []
    by_rejection = session.manifest.rule == "rejection" and contenders[0].options.sampling.temperature > 0
    for contender in contenders[1:] if not by_rejection else []:  # then plans share a distribution, not a text
        for prompt, ours, theirs in zip(prompts, contender.rounds[0].texts, contenders[0].rounds[0].texts, strict=True):
            difference = first_difference(session, prompt, contender.options, theirs, ours)
            if difference is not None and not difference.is_near_tie:
                raise PassError(f"{contender.name} wrote another text than {contenders[0].name}: {difference}")
            if difference is not None:
                near_ties.append(f"{contender.name}: {difference}")
    return near_ties


def _contenders(session: Session, request: BenchOptions) -> list[Contender]:
    """Return the requested combinations of plan, draft source and look-ahead; `ar` has neither of the last two."""
    lookaheads = request.lookahead or (session.manifest.lookahead.length,)
    contenders: dict[str, Contender] = {}
    sampling = request.sampling.seeded()  # one seed, so that all plans write the same text
    drafts, batches = request.drafts or (None,), request.batches or (None,)
    for batch, plan, draft, lookahead in itertools.product(batches, request.plans or PLANS, drafts, lookaheads):
        options = GenerateOptions(
            max_new_tokens=request.max_new_tokens,
            sampling=sampling,
            plan=plan,
            lookahead=lookahead,
            draft=None if plan == "ar" else draft,
            ignore_eos=True,
        )
        name = contender_name(session, options) + (f" x{batch}" if batch is not None else "")
        contenders.setdefault(name, Contender(name, options, batch))
    return list(contenders.values())


def contender_name(session: Session, options: GenerateOptions) -> str:
    """Return the name of a plan with its drafts: `two-pass L=4`, `fused:4,2,1 +ngram`, `ngram L=4`."""
    if options.plan == "auto":
        return "auto" if options.draft in (None, "both") else f"auto ({options.draft})"
    resolved = session.resolve(options)
    name, drafts = resolved.name, max(resolved.lookahead, resolved.ngram_drafts)
    shape = "" if ":" in name or not drafts else f" L={drafts}"
    return name.removesuffix("+ngram") + shape + (" +ngram" if name.endswith("+ngram") else "")


def parse_sizes(flag: str, what: str, example: str, text: str | None) -> tuple[int, ...]:
    """Parse `1,2,4,8` to (1, 2, 4, 8), and None to ()."""
    if text is None:
        return ()
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PassError(f"{flag} must list numbers of {what}, as in {example}, not {text!r}")
    return sizes


def _cells(plan: dict[str, Any], *, batched: bool) -> dict[str, str]:
    """Return a row of the table; acceptance is per draft position, 1..L."""
    cells = {"plan": plan["plan"], "tokens/s in all" if batched else "tokens/s": f"{plan['tokens_per_second']:.1f}"}
    if batched:
        cells["each"] = f"{plan['tokens_per_second_each']:.1f}"
    cells["ratio"] = f"{plan['ratio']:.2f}"
    cells["ms/pass"] = f"{plan['milliseconds_per_pass']:.1f}"
    cells["host"] = f"{plan['host_milliseconds_per_pass']:.2f}"
    if "cost" in plan:
        names, predicted = ("trunk_milliseconds", "tail_milliseconds", "cost"), plan["predicted_tokens_per_second_each"]
        parts = [plan[name] for name in names] + [predicted and plan["tokens_per_second_each"] / predicted]
        headings = ("trunk", "tail", "cost", "measured / predicted")
        cells |= {name: "-" if part is None else f"{part:.2f}" for name, part in zip(headings, parts, strict=True)}
    cells["tau"] = f"{plan['tau']:.2f}"
    cells["acceptance by position"] = " ".join(f"{rate:.2f}" for rate in plan["acceptance_per_position"]) or "-"
    return cells


def print_plans(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    batched = any(plan["batch"] for plan in report["plans"])
    title = f"{report['bundle']} on {report['device']}: {report['machine']}"
    rows = [_cells(plan, batched=batched) for plan in report["plans"]]
    show_rows(title, rows, left=("plan", "acceptance by position"))
    console = OutputConsole()
    console.print(f"look-ahead embeddings: {report['lookahead_source']}", highlight=False, soft_wrap=True)
    for name, reason in report["uncaptured"].items():
        console.print(f"{name} ran without a CUDA graph: {reason}", highlight=False, soft_wrap=True, style="yellow")
    if report["device"] != "cpu" and not report["uncaptured"]:
        console.print("passes were captured as CUDA graphs", soft_wrap=True)
    if report["rule"] == "rejection" and report["sampling"]["temperature"] > 0:
        console.print(
            "the rejection rule: every plan wrote a text of its own from the same distribution", soft_wrap=True
        )
        return
    same = "token for token" if not report["near_ties"] else "up to near-ties: " + "; ".join(report["near_ties"])
    console.print(f"every plan wrote the same text, {same}", highlight=False, soft_wrap=True)
