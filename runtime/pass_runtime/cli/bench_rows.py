"""pass-run bench --rows and --breakdown: times the trunk and the tail of single passes.

--rows times windows of given numbers of rows. --breakdown times the passes of every plan that is
compared, and predicts the plan's speed from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from pass_runtime.backends.base import Capabilities, PassKind
from pass_runtime.bundle.plan import (
    Plan,
    ar_plan,
    draft_plan,
    fused_plan,
    prefill_plan,
    verify_plan,
)
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.tables import OutputConsole, show_rows
from pass_runtime.decode.runner import Runner
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import in_turns, pass_seconds
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

SaveReport = Callable[[dict[str, Any]], None]


class Breakdown:
    """Times trunk and tail in the passes of every plan.

    `auto` and plans with n-gram drafts have no breakdown, because they choose their passes while
    they decode.
    """

    def __init__(
        self, session: Session, plans: Mapping[str, tuple[GenerateOptions, int | None]]
    ) -> None:
        """plans: what `--plan` and `--draft` named (modes): by name, the options, and how many
        sequences run together (None: one by one)."""
        self._session = session
        self._ar_passes = {name: self._ar_pass(*plan) for name, plan in plans.items()}
        self._cycles = {name: self._cycle(name, options) for name, (options, _) in plans.items()}
        self._seconds: dict[PassKind, list[tuple[float, float]]] = {
            kind: []
            for kinds in (self._ar_passes.values(), *self._cycles.values())
            for kind in kinds
        }

    def _ar_pass(self, options: GenerateOptions, batch: int | None) -> PassKind:
        slots = self._session.backend.capabilities.batch_size(batch or 1)
        return PassKind(ar_plan(), slots, options.sampling.sampler)

    def _cycle(self, name: str, options: GenerateOptions) -> list[PassKind]:
        resolved = self._session.resolve(options)
        plans = () if resolved.cycle is None or resolved.ngram_drafts else resolved.cycle.plans
        return [replace(self._ar_passes[name], plan=plan) for plan in plans]

    def time(self) -> None:
        """Time the passes of every plan. Call it after each round of the bench, whose requests have
        made the KV cache as large as it is to be timed."""
        for kind, seconds in self._seconds.items():
            seconds.append(self._session.call(lambda runner, kind=kind: pass_seconds(runner, kind)))  # type: ignore[misc]

    def as_dict(self, name: str, tau: float) -> dict[str, float | None]:
        """Return the fields of a plan in the report, which are None without a breakdown. Trunk and
        tail are means over the plan's passes. The prediction is the speed of one sequence if a pass
        took trunk and tail alone, and cost is the sum of both relative to that of an `ar` pass."""
        names = (
            "trunk_milliseconds",
            "tail_milliseconds",
            "predicted_tokens_per_second_each",
            "cost",
        )
        if not (kinds := self._cycles[name]):
            return dict.fromkeys(names)
        times = [self._median(kind) for kind in kinds]
        trunk, tail = (statistics.mean(seconds) for seconds in zip(*times, strict=True))
        ar = sum(self._median(self._ar_passes[name]))
        values = (1e3 * trunk, 1e3 * tail, tau / (trunk + tail), (trunk + tail) / ar)
        return dict(zip(names, values, strict=True))

    def _median(self, kind: PassKind) -> tuple[float, float]:
        """Return the median seconds of trunk and tail over rounds."""
        trunk, tail = (statistics.median(part) for part in zip(*self._seconds[kind], strict=True))
        return trunk, tail


MAX_LISTED_ROW_COUNTS = 8
"""The most row counts that an error lists one by one."""


@dataclass(frozen=True)
class RowsOptions:
    """Which passes to time. rows: numbers of rows in a window. batches: numbers of slots in a pass;
    all combinations of both are timed. cached: the number of tokens in each slot's KV cache.
    whole_cache: whether to use the largest KV capacity, and not the smallest that is enough."""

    sampling: SamplingParams
    rows: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    cached: int = 200
    whole_cache: bool = False
    repeat: int = 3


def measure_rows(
    session: Session,
    request: RowsOptions,
    prompts: Iterable[list[int]],
    save: SaveReport = lambda _report: None,
) -> dict[str, Any]:
    """Time passes and return the report. In each round every kind of pass is run several times in
    succession. A time is the median over rounds of the medians in each round.

    The slots hold the tokens of `prompts`, repeated if necessary. Every ratio is to a pass with one
    row over the same number of slots, which is always timed. save: called after every round but the
    last, with the report so far.
    """
    requested = [plan for rows in request.rows for plan in allowed_windows(rows, session)]
    plans = list(dict.fromkeys([ar_plan(), *requested]))
    runner = filled_runner(
        session, request, sum(prompts, list[int]()), max(plan.width for plan in plans)
    )
    kinds = [
        PassKind(plan, batch, request.sampling.sampler)
        for batch in request.batches
        for plan in plans
    ]

    def seconds_of(kind: PassKind) -> tuple[float, float]:
        return session.call(lambda _: pass_seconds(runner, kind, tail=_has_tail(kind.plan)))

    calls = {kind: partial(seconds_of, kind) for kind in kinds}
    for number, seconds in enumerate(in_turns(calls, request.repeat), 1):
        if number < request.repeat:
            save(_report(request, runner, seconds))
    return _report(request, runner, seconds)


def _has_tail(plan: Plan) -> bool:
    """Return whether passes of a plan have a tail: those that read part of a prompt have none."""
    return plan != prefill_plan(plan.width)


def _report(
    request: RowsOptions, runner: Runner, seconds: dict[PassKind, list[tuple[float, float]]]
) -> dict[str, Any]:
    def row(kind: PassKind) -> dict[str, Any]:
        trunks, tails = zip(*seconds[kind], strict=True)
        ar_trunks, _ = zip(*seconds[PassKind(ar_plan(), kind.batch, kind.sampler)], strict=True)
        return {
            "rows": kind.plan.width,
            "window": kind.plan.name,
            "lookahead_rows": sum(kind.plan.groups),
            "batch": kind.batch,
            "trunk_milliseconds": 1e3 * statistics.median(trunks),
            "ratio": statistics.median(a / b for a, b in zip(trunks, ar_trunks, strict=True)),
            "tail_milliseconds": 1e3 * statistics.median(tails) if _has_tail(kind.plan) else None,
        }

    return {
        "sampling": asdict(request.sampling),
        "repeat": len(next(iter(seconds.values()))),
        "cached": request.cached,
        "capacity": runner.backend.capacity,
        "rows": [row(kind) for kind in seconds],
    }


def windows(rows: int, lookahead: int) -> list[Plan]:
    """Return the windows of `rows` rows that are worth timing. lookahead: L of the bundle.

    For 1 row that is `ar`. For up to L + 1 rows: drafts without look-ahead rows, look-ahead rows
    without drafts (the two windows of `two-pass`), and the `fused` window with the fewest drafts if
    there is one. For more rows: this `fused` window, and a chunk of a prompt to compare it with;
    nothing if there is no such window.
    """
    if rows == 1:
        return [ar_plan()]
    is_short = rows - 1 <= lookahead
    others = [verify_plan(rows - 1), draft_plan(rows - 1)] if is_short else [prefill_plan(rows)]
    for drafts in range(1, lookahead + 1):
        # They make drafts + 1 groups. Each has `drafts` rows at most, those of the next window.
        lookahead_rows = rows - 1 - drafts
        if 1 <= lookahead_rows <= drafts * (drafts + 1):
            size, larger = divmod(lookahead_rows, drafts + 1)
            return [*others, fused_plan([size + (group < larger) for group in range(drafts + 1)])]
    return others if is_short else []


def allowed_windows(rows: int, session: Session) -> list[Plan]:
    """Return the `windows` that the session's engine can run. Raises PassError if none can be."""
    lookahead, capabilities = session.manifest.lookahead.length, session.backend.capabilities
    plans = _allowed(rows, lookahead, capabilities)
    if not plans:
        widest = 1 + lookahead + (lookahead + 1) * lookahead  # root, drafts, and full groups
        possible = [str(n) for n in range(1, widest + 1) if _allowed(n, lookahead, capabilities)]
        are_few = len(possible) <= MAX_LISTED_ROW_COUNTS
        counts = ", ".join(possible) if are_few else f"1 to {possible[-1]}"
        raise PassError(
            f"--rows {rows}: no window has so many rows; choose from {counts} for this bundle"
        )
    return plans


def _allowed(rows: int, lookahead: int, capabilities: Capabilities) -> list[Plan]:
    return [plan for plan in windows(rows, lookahead) if capabilities.allows([plan])]


def filled_runner(
    session: Session, request: RowsOptions, tokens: Sequence[int], widest: int
) -> Runner:
    """Return a runner each of whose slots has the first `cached` of `tokens` in its KV cache,
    repeated if they are too few. While the runner is used, the session must have no requests.
    widest: the rows of the widest window, for which the cache needs room."""
    runner, capabilities = Runner(session.backend), session.backend.capabilities
    entries = request.cached + max(widest, capabilities.least_width)
    if entries > capabilities.max_capacity:
        raise PassError(
            f"{request.cached} cached tokens and {widest} rows need a KV capacity of {entries}, "
            f"which is more than {capabilities.max_capacity}: lower --cached or raise --capacity"
        )
    # One token more than is cached: the root, whose K/V the first pass writes.
    prompt = tuple((list(tokens) * (request.cached // len(tokens) + 1))[: request.cached + 1])
    single = session.request(prompt, GenerateOptions(1, request.sampling, plan="ar"))
    capacity = capabilities.max_capacity if request.whole_cache else capabilities.capacity(entries)

    def fill(_: Runner) -> None:
        for _slot in range(max(request.batches)):
            runner.admit(SequenceState(single))
        for slot in runner.busy:
            while slot.cached < request.cached:
                runner.prefill(slot)
        runner.backend.resize(capacity, [slot.cached for slot in runner.slots])

    session.call(fill)
    return runner


def print_rows(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report as a table on a console, by default standard output."""
    console = console or OutputConsole()
    batched = any(row["batch"] > 1 for row in report["rows"])
    rows = [
        ({"sequences": str(row["batch"])} if batched else {})
        | {
            "rows": str(row["rows"]),
            "window": row["window"],
            "look-ahead rows": str(row["lookahead_rows"]),
            "trunk, ms": f"{row['trunk_milliseconds']:.2f}",
            "ratio": f"{row['ratio']:.2f}",
            "tail, ms": "-" if (tail := row["tail_milliseconds"]) is None else f"{tail:.2f}",
        }
        for row in report["rows"]
    ]
    show_rows(
        f"{report['bundle']} on {report['device']}, kernels {report['kernels']}: "
        f"{report['machine']}",
        rows,
        ("window",),
        console,
    )
    console.print(
        f"{report['cached']} cached tokens, KV capacity {report['capacity']}; ratios are to "
        "one row",
        highlight=False,
    )
