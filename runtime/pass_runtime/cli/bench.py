"""pass-run bench: plans side by side on the same prompts, in alternation, so that a noisy machine is fair to all."""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import onnxruntime as ort
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pass_runtime.bundle.plan import MODES
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.prompts import read_prompts
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session
from pass_runtime.testing.lossless import first_difference, run_tokens

PROMPTS = (
    "The history of the Roman Empire begins with",
    "def quicksort(items):\n    ",
    "To bake a loaf of bread, first",
    "Photosynthesis is the process by which",
)


PLANS = (*MODES, "auto")


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

    def texts(self) -> tuple[str, ...]:
        """The prompts to use."""
        if self.prompt_file is None:
            return self.prompts or PROMPTS
        return (*self.prompts, *read_prompts(self.prompt_file))


@dataclass(frozen=True)
class Round:
    """Every request once: what they did, and the seconds that count."""

    stats: list[Stats]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(stats.generated_tokens for stats in self.stats)


@dataclass
class Contender:
    """One plan, `batch` sequences at a time (None: one by one, and only decoding counts), and its measurements."""

    name: str
    options: GenerateOptions
    batch: int | None = None
    rounds: list[Round] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def run(self, session: Session, prompts: Sequence[list[int]]) -> tuple[list[list[int]], Round]:
        """-> (what was written, how fast). Groups of `batch` prompts begin together and are all as long."""
        if self.batch is None:
            streams = [run_tokens(session, prompt, self.options) for prompt in prompts]
            stats = [stream.stats for stream in streams]
            return [s.token_ids for s in streams], Round(stats, sum(s.decode_seconds for s in stats))
        streams, started = [], time.perf_counter()
        for first in range(0, len(prompts), self.batch):
            group = [session.generate_ids(prompt, self.options) for prompt in prompts[first : first + self.batch]]
            streams += [stream.run() for stream in group]
        seconds = time.perf_counter() - started
        return [s.token_ids for s in streams], Round([s.stats for s in streams], seconds)

    @property
    def rates(self) -> list[float]:
        """Tokens/s of every round."""
        return [each.tokens / each.seconds for each in self.rounds]

    def as_dict(self, baseline: Contender) -> dict[str, Any]:
        total = sum_stats(self.rounds[0].stats)  # every round decodes the same tokens
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
    """The counts of several generations of one plan, as of one."""
    total = Stats(plan=parts[0].plan, lookahead=parts[0].lookahead)
    for stats in parts:
        for name in ("generated_tokens", "passes", "emitted", "steps", "drafted", "accepted"):
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        total.histogram += stats.histogram
    return total


def run_bench(session: Session, request: BenchOptions) -> dict[str, Any]:
    """Time plans against each other: the report, without `about`."""
    texts = request.texts()
    count = max(len(texts), *request.batches) if request.batches else len(texts)
    prompts = [session.encode(texts[i % len(texts)]) for i in range(count)]
    contenders = _contenders(session, request)
    if any(contender.options.plan == "auto" for contender in contenders):
        session.warm_up(contenders[0].options.sampling)  # as servers do: which sizes a round meets is chance
    near_ties = _measure(session, prompts, contenders, request.repeat)
    return {
        "lookahead_source": session.manifest.lookahead.source,
        "prompts": len(prompts),
        "max_new_tokens": request.max_new_tokens,
        "sampling": asdict(contenders[0].options.sampling),
        "repeat": request.repeat,
        "rule": session.manifest.rule,
        "near_ties": near_ties,
        "plans": [contender.as_dict(contenders[0]) for contender in contenders],
    }


def about(session: Session) -> dict[str, Any]:
    """What was measured, and on what."""
    return {
        "bundle": session.manifest.model.name,
        "dtype": session.manifest.model.dtype,
        "weights": session.manifest.model.weights,
        "device": session.backend.capabilities.device,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, onnxruntime {ort.__version__}",
    }


def tell(
    report: dict[str, Any], print_table: Callable[[dict[str, Any]], None], *, as_json: bool, output: Path | None
) -> None:
    """A table or JSON, and JSON to `output`."""
    text = json.dumps(report, indent=2)
    if output is not None:
        write_whole(output, text + "\n")
    if as_json:
        click.echo(text)
    else:
        print_table(report)


def _measure(session: Session, prompts: list[list[int]], contenders: list[Contender], repeat: int) -> list[str]:
    """Round 0 warms up; then every round runs every plan. Checks that all plans wrote the same text."""
    near_ties = []
    console = Console(stderr=True)
    rounds = range(repeat + 1)
    for number in track(rounds, "bench", console=console, transient=True) if console.is_terminal else rounds:
        for contender in contenders:
            texts, measured = contender.run(session, prompts)
            if number == 0:
                contender.texts = texts
            else:
                contender.rounds.append(measured)
    by_rejection = session.manifest.rule == "rejection" and contenders[0].options.sampling.temperature > 0
    for contender in contenders[1:] if not by_rejection else []:  # those only share a distribution
        for prompt, ours, theirs in zip(prompts, contender.texts, contenders[0].texts, strict=True):
            difference = first_difference(session, prompt, contender.options, theirs, ours)
            if difference is not None and not difference.is_near_tie:
                raise PassError(f"{contender.name} wrote another text than {contenders[0].name}: {difference}")
            if difference is not None:
                near_ties.append(f"{contender.name}: {difference}")
    return near_ties


def _contenders(session: Session, request: BenchOptions) -> list[Contender]:
    """Every plan with every draft source and look-ahead that was asked for; `ar` takes neither."""
    lookaheads = request.lookahead or (session.manifest.lookahead.length,)
    contenders: dict[str, Contender] = {}
    sampling = request.sampling.seeded()  # the same text for all
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
    """The mode and what it drafts: `two-pass L=4`, `fused:4,2,1 +ngram`, `ngram L=4`."""
    if options.plan == "auto":
        return "auto" if options.draft in (None, "both") else f"auto ({options.draft})"
    mode = session.mode(options)
    drafts = max(mode.lookahead, mode.text_drafts)
    shape = "" if ":" in mode.name or not drafts else f" L={drafts}"
    return mode.name.removesuffix("+ngram") + shape + (" +ngram" if mode.name.endswith("+ngram") else "")


def parse_sizes(flag: str, what: str, example: str, text: str | None) -> tuple[int, ...]:
    """`1,2,4,8` -> (1, 2, 4, 8); () where nobody asked."""
    if text is None:
        return ()
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise PassError(f"{flag} must list numbers of {what}, as in {example}, not {text!r}")
    return sizes


def print_table(report: dict[str, Any]) -> None:
    """The report for people: acceptance is per draft position, 1..L."""
    table = Table(title=f"{report['bundle']} on {report['device']}: {report['machine']}", title_justify="left")
    batched = any(plan["batch"] for plan in report["plans"])
    rates = ("tokens/s in all", "each") if batched else ("tokens/s",)
    for heading in ("plan", *rates, "ratio", "ms/pass", "host", "tau", "acceptance by position"):
        table.add_column(heading, justify="left" if heading in ("plan", "acceptance by position") else "right")
    for plan in report["plans"]:
        table.add_row(
            plan["plan"],
            f"{plan['tokens_per_second']:.1f}",
            *([f"{plan['tokens_per_second_each']:.1f}"] if batched else []),
            f"{plan['ratio']:.2f}",
            f"{plan['milliseconds_per_pass']:.1f}",
            f"{plan['host_milliseconds_per_pass']:.2f}",
            f"{plan['tau']:.2f}",
            " ".join(f"{rate:.2f}" for rate in plan["acceptance_per_position"]) or "-",
        )
    console = Console()
    console.print(table)
    console.print(f"look-ahead embeddings: {report['lookahead_source']}", highlight=False)
    if report["rule"] == "rejection" and report["sampling"]["temperature"] > 0:
        console.print("the rejection rule: every plan wrote a text of its own from the same distribution")
        return
    same = "token for token" if not report["near_ties"] else "up to near-ties: " + "; ".join(report["near_ties"])
    console.print(f"every plan wrote the same text, {same}", highlight=False)
