"""pass-run bench --rows: times trunk and tail of single passes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pass_runtime.backends.base import Batch
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.window import (
    Window,
    ar_window,
    draft_window,
    fused_window,
    prefill_window,
    verify_window,
)
from pass_runtime.cli.tables import OutputConsole, show_rows
from pass_runtime.decode.engine import Engine
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import in_turns, pass_seconds
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session
from pass_runtime.tuning.auto import Auto

SaveReport = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RowsOptions:
    """Which passes to time: all combinations of rows and slots (`batches`). cached: tokens in each
    slot's KV cache. whole_cache: use the largest KV capacity, not the least that is enough."""

    sampling: SamplingParams
    rows: tuple[int, ...]
    batches: Sequence[int] = (1,)
    cached: int = 200
    whole_cache: bool = False
    repeat: int = 3


def measure_rows(
    session: Session,
    request: RowsOptions,
    prompts: Iterable[list[int]],
    save: SaveReport = lambda _report: None,
) -> dict[str, Any]:
    """Time passes over slots that hold the tokens of `prompts`, and return the report, of medians
    over rounds. Ratios are to one row over the same number of slots. save: gets the report after
    every round but the last."""
    requested = [each for rows in request.rows for each in allowed_windows(rows, session)]
    windows = list(dict.fromkeys([ar_window(), *requested]))
    engine = filled_engine(
        session, request, sum(prompts, list[int]()), max(window.width for window in windows)
    )
    kinds = [
        Batch(window, batch, request.sampling.sampler)
        for batch in request.batches
        for window in windows
    ]

    def seconds_of(kind: Batch) -> tuple[float, float]:
        return session.call(lambda _: pass_seconds(engine, kind, tail=_has_tail(kind.window)))

    calls = {kind: partial(seconds_of, kind) for kind in kinds}
    for number, seconds in enumerate(in_turns(calls, request.repeat), 1):
        if number < request.repeat:
            save(_report(request, engine, seconds))
    return _report(request, engine, seconds)


def _has_tail(window: Window) -> bool:
    return window != prefill_window(window.width)


def _report(
    request: RowsOptions, engine: Engine, seconds: dict[Batch, list[tuple[float, float]]]
) -> dict[str, Any]:
    def row(kind: Batch) -> dict[str, Any]:
        trunks, tails = zip(*seconds[kind], strict=True)
        ar_trunks, _ = zip(*seconds[Batch(ar_window(), kind.size, kind.sampler)], strict=True)
        return {
            "rows": kind.window.width,
            "window": kind.window.name,
            "lookahead_rows": sum(kind.window.groups),
            "batch": kind.size,
            "trunk_milliseconds": 1e3 * statistics.median(trunks),
            "ratio": statistics.median(a / b for a, b in zip(trunks, ar_trunks, strict=True)),
            "tail_milliseconds": 1e3 * statistics.median(tails) if _has_tail(kind.window) else None,
        }

    return {
        "sampling": asdict(request.sampling),
        "repeat": len(next(iter(seconds.values()))),
        "cached": request.cached,
        "capacity": engine.backend.capacity,
        "rows": [row(kind) for kind in seconds],
    }


def windows(rows: int, lookahead: int) -> list[Window]:
    """Return the windows of `rows` rows that are worth timing: with drafts, with look-ahead rows,
    and the fused one with the fewest drafts; for more than L + 1 rows, a chunk of a prompt in place
    of the first two. lookahead: L of the bundle."""
    if rows == 1:
        return [ar_window()]
    is_short = rows - 1 <= lookahead
    others = (
        [verify_window(rows - 1), draft_window(rows - 1)] if is_short else [prefill_window(rows)]
    )
    for drafts in range(1, lookahead + 1):
        # They make drafts + 1 groups. Each has `drafts` rows at most, those of the next window.
        lookahead_rows = rows - 1 - drafts
        if 1 <= lookahead_rows <= drafts * (drafts + 1):
            size, larger = divmod(lookahead_rows, drafts + 1)
            return [*others, fused_window([size + (group < larger) for group in range(drafts + 1)])]
    return others if is_short else []


def allowed_windows(rows: int, session: Session) -> list[Window]:
    """Return the `windows` that the session's engine can run. Raises PassError if none can be."""
    lookahead, capabilities = session.manifest.lookahead.length, session.backend.capabilities
    allowed = [each for each in windows(rows, lookahead) if capabilities.allows([each])]
    if not allowed:
        widest = 1 + lookahead + (lookahead + 1) * lookahead  # root, drafts, and full groups
        raise PassError(
            f"--rows {rows}: this bundle has no such window here; its widest has {widest} rows"
        )
    return allowed


def filled_engine(
    session: Session, request: RowsOptions, tokens: Sequence[int], widest: int
) -> Engine:
    """Return an engine whose slots have `cached` of the tokens, repeated if necessary, in their KV
    caches, with room for `widest` rows. The session must have no requests meanwhile."""
    capabilities, count = session.backend.capabilities, max(request.batches)
    engine = Engine(session.backend, Auto(session.manifest.lookahead, capabilities))
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

    def fill(_: Engine) -> None:
        engine.reserve(count)
        engine.add(*(SequenceState(single) for _ in range(count)))
        engine.admit()
        while any(slot.cached < request.cached for slot in engine.slots[:count]):
            engine.read_prompts()
        engine.resize(capacity)

    session.call(fill)
    return engine


def print_rows(report: dict[str, Any]) -> None:
    console = OutputConsole()
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
