"""pass-run bench: compares plans on the same prompts, in alternation, so that a noisy machine affects all alike."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import click
import onnxruntime as ort
from rich.console import Console
from rich.progress import track

from pass_runtime.bundle.plan import MODES
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.bench_rows import Breakdown, Save
from pass_runtime.cli.prompt_io import read_prompts
from pass_runtime.decode.stats import Stats
from pass_runtime.errors import PassError
from pass_runtime.files import to_json, write_whole
from pass_runtime.measuring.lossless import first_difference, loop_start, run_tokens
from pass_runtime.measuring.real_use import FIRST_LOOK_PROMPTS, encode, in_turns, read_prompt_set
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

PLANS = (*MODES, "auto")
CONTESTANTS: Mapping[str, Mapping[str, str]] = {
    "ar": {"plan": "ar"},
    "auto (lookahead)": {"plan": "auto", "draft": "lookahead"},
    "auto": {"plan": "auto"},
}
"""What is compared unless something else is asked for: options by `contender_name`."""
LABEL = 32
"""The most characters of a prompt's label."""
PAGE_COLUMNS = 100
"""The width of the tables in a page."""
T = TypeVar("T")


@dataclass(frozen=True)
class BenchOptions:
    sampling: SamplingParams
    prompts: tuple[str, ...] = ()
    prompt_file: Path | None = None
    max_new_tokens: int = 48
    plans: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    lookahead: tuple[int, ...] = ()
    repeat: int = 3
    batches: tuple[int, ...] = ()
    breakdown: bool = False

    def encoded(self, session: Session) -> dict[str, list[int]]:
        """Return the tokens of the prompts of flags and file, or else of FIRST_LOOK_PROMPTS, by a label."""
        if self.prompts or self.prompt_file:
            texts = (*self.prompts, *(read_prompts(self.prompt_file) if self.prompt_file else ()))
            return {_label(str(number), text): session.encode(text) for number, text in enumerate(texts, 1)}
        prompts = read_prompt_set(FIRST_LOOK_PROMPTS)
        return {_label(prompt.id, prompt.text): encode(session, prompt) for prompt in prompts}


def _label(name: str, text: str) -> str:
    label = " ".join(f"{name}: {text}".split())
    return label if len(label) <= LABEL else f"{label[: LABEL - 3]}..."


@dataclass(frozen=True)
class Turn:
    """One run of prompts that begin together: the text and the counts of each, and the seconds that are compared."""

    texts: list[list[int]]
    stats: list[Stats]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(stats.generated_tokens for stats in self.stats)


def rate(turns: Iterable[Turn]) -> float:
    """Tokens per second."""
    turns = list(turns)
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


@dataclass
class Contender:
    """A plan and its measurements. batch: sequences at a time; None is one by one, and then only decoding is timed.
    rounds: the turns of each round, in the order of the prompts."""

    name: str
    options: GenerateOptions
    batch: int | None = None
    rounds: list[list[Turn]] = field(default_factory=list)

    def run(self, session: Session, prompts: Sequence[list[int]]) -> Turn:
        """Run prompts that begin together; one prompt, if they run one by one."""
        started = time.perf_counter()
        if self.batch is None:
            streams = [run_tokens(session, prompt, self.options) for prompt in prompts]
            seconds = sum(stream.stats.decode_seconds for stream in streams)
        else:
            streams = [stream.result() for stream in [session.generate_ids(ids, self.options) for ids in prompts]]
            seconds = time.perf_counter() - started
        return Turn([s.token_ids for s in streams], [s.stats for s in streams], seconds)

    @property
    def texts(self) -> list[list[int]]:
        """The text of every prompt in the first round."""
        return [text for turn in self.rounds[0] for text in turn.texts]

    def as_dict(self, baseline: Contender, labels: Sequence[str]) -> dict[str, Any]:
        """labels: of the prompts."""
        total = sum_stats([stats for turn in self.rounds[0] for stats in turn.stats])  # all rounds decode the same
        seconds = [sum(s.decode_seconds for turn in turns for s in turn.stats) for turns in self.rounds]
        host = [sum(s.host_seconds for turn in turns for s in turn.stats) for turns in self.rounds]
        found: dict[str, Any] = {
            "plan": self.name,
            "batch": self.batch,
            **self._speed(baseline, slice(None)),
            "tokens_per_second_each": statistics.median(total.generated_tokens / spent for spent in seconds),
            "milliseconds_per_pass": 1e3 * statistics.median(seconds) / total.passes,
            "host_milliseconds_per_pass": 1e3 * statistics.median(host) / total.passes,
            "tau": total.tau,
            "mean_acceptance_length": total.mean_acceptance_length,
            "draft_acceptance_rate": total.draft_acceptance_rate,
            "acceptance_per_position": total.acceptance_per_position,
        }
        if self.batch is None:
            found["by_prompt"] = [
                {"prompt": label, **self._speed(baseline, slice(i, i + 1)), "tau": self.rounds[0][i].stats[0].tau}
                for i, label in enumerate(labels)
            ]
        return found

    def _speed(self, baseline: Contender, turns: slice) -> dict[str, float]:
        """Medians over rounds, of these turns."""
        ours, theirs = ([rate(each[turns]) for each in contender.rounds] for contender in (self, baseline))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        return {"tokens_per_second": statistics.median(ours), "ratio": ratio}


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
    given = request.encoded(session)
    count = max(len(given), *request.batches) if request.batches else len(given)
    labels = list(itertools.islice(itertools.cycle(given), count))
    prompts = [given[label] for label in labels]
    contenders = _contenders(session, request)
    if any(contender.options.plan == "auto" for contender in contenders):
        session.warm_up(contenders[0].options.sampling)  # as servers do; otherwise chance decides when sizes are timed
    breakdown = Breakdown(session, {c.name: (c.options, c.batch) for c in contenders}) if request.breakdown else None

    def entry(contender: Contender) -> dict[str, Any]:
        found = contender.as_dict(contenders[0], labels)
        return found | (breakdown.of(contender.name, found["tau"]) if breakdown else {})

    def report(compared: Mapping[str, list[str] | None]) -> dict[str, Any]:
        return {
            "lookahead_source": session.manifest.lookahead.source,
            "prompts": len(prompts),
            "looping": sum(loop_start(text) is not None for text in contenders[0].texts),
            "max_new_tokens": request.max_new_tokens,
            "sampling": asdict(contenders[0].options.sampling),
            "repeat": len(contenders[0].rounds),
            "rule": session.manifest.rule,
            **compared,
            "plans": [entry(contender) for contender in contenders],
        }

    for found in _shown(in_turns(_turns(session, contenders, prompts), request.repeat), request.repeat):
        for contender in contenders:
            turns = [rounds for (name, _), rounds in found.items() if name == contender.name]
            contender.rounds = [list(each) for each in zip(*turns, strict=True)]
        if breakdown:
            breakdown.time()
        if len(contenders[0].rounds) < request.repeat:
            save(report({"near_ties": None, "differences": None}))  # the texts are compared at the end
    return report(_compared(session, prompts, contenders))


def _turns(
    session: Session, contenders: Sequence[Contender], prompts: Sequence[list[int]]
) -> dict[tuple[str, int], Callable[[], Turn]]:
    """Return the turns of a round, by contender and first prompt: at every prompt all contenders take turns."""
    calls: dict[tuple[str, int], Callable[[], Turn]] = {}
    for first in range(len(prompts)):
        for contender in contenders:
            size = contender.batch or 1
            if first % size == 0:
                calls[contender.name, first] = partial(contender.run, session, prompts[first : first + size])
    return calls


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
    """Write the report to `output`, beside its place and renamed. A page (`is_page`) is written at the end."""
    if output is not None and not is_page(output):
        write_whole(output, to_json(report, indent=2) + "\n")


def is_page(output: Path) -> bool:
    return output.suffix == ".html"


def show_report(
    report: dict[str, Any], print_report: Callable[..., None], *, as_json: bool, output: Path | None
) -> None:
    """Print a table or JSON, and write JSON to `output`, or what is printed as HTML.

    print_report: called with the report, and with a console that it prints to in place of standard output.
    """
    write_json(report, output)
    if output is not None and is_page(output):
        console = Console(record=True, file=StringIO(), width=PAGE_COLUMNS)
        print_report(report, console)
        write_whole(output, console.export_html())
    if as_json:
        click.echo(to_json(report, indent=2))
    else:
        print_report(report)


def _compared(session: Session, prompts: list[list[int]], contenders: list[Contender]) -> dict[str, list[str] | None]:
    """Compare the texts of all contenders with those of the first, token for token. Return what differs as `near_ties`
    if rows of different windows may round differently, and as `differences` otherwise."""
    near_ties, differences = list[str](), list[str]()
    by_rejection = session.manifest.rule == "rejection" and contenders[0].options.sampling.temperature > 0
    for contender in contenders[1:] if not by_rejection else []:  # then plans share a distribution, not a text
        for prompt, ours, theirs in zip(prompts, contender.texts, contenders[0].texts, strict=True):
            found = first_difference(session, prompt, contender.options, theirs, ours)
            if found is not None:
                excused = found.is_near_tie and not session.backend.capabilities.same_entries
                (near_ties if excused else differences).append(f"{contender.name}: {found}")
    return {"near_ties": near_ties, "differences": differences}


def _contenders(session: Session, request: BenchOptions) -> list[Contender]:
    """Return the requested combinations of plan, draft source and look-ahead; `ar` has neither of the last two."""
    lookaheads = request.lookahead or (session.manifest.lookahead.length,)
    contenders: dict[str, Contender] = {}
    sampling = request.sampling.seeded()  # one seed, so that all plans write the same text
    chosen: list[Mapping[str, Any]] = [
        {"plan": plan, "draft": None if plan == "ar" else draft, "lookahead": lookahead}
        for plan, draft, lookahead in itertools.product(request.plans or PLANS, request.drafts or (None,), lookaheads)
    ]
    if not (request.plans or request.drafts or request.lookahead):
        chosen = [*CONTESTANTS.values()]
    for batch, fields in itertools.product(request.batches or (None,), chosen):
        options = GenerateOptions(max_new_tokens=request.max_new_tokens, sampling=sampling, ignore_eos=True, **fields)
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
