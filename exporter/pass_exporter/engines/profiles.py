"""The shapes that engines are tuned for: one optimization profile for every window that decoding repeats.

A window is (width Q, look-ahead rows A). Only trees and plans with all of the bundle's drafts have profiles, with full
groups, for exactly their windows. Fewer rows would save little where rows are nearly free, every profile of SmolLM2
takes seconds to build, and TensorRT-RTX 1.7 refuses one profile with ranges in fp16. Every profile exists for each
number of cache columns that a pass may read, for a batch of one, and for up to `max_batch_size` if that is larger.
"""

from __future__ import annotations

from collections.abc import Sequence

from pass_runtime.backends.base import listed_positions
from pass_runtime.backends.memory import wide_chunks
from pass_runtime.bundle.manifest import Manifest, Profile
from pass_runtime.bundle.plan import MODES, Plan, make_cycle
from pass_runtime.bundle.sampling import LIST_SIZES

PREFILL_WIDTHS = (256, 32)
"""The widths of a prompt's chunks, beside those of `backends.chunks.WIDE` for which there is room."""
FIRST_COLUMNS = 512
COLUMNS_FACTOR = 4
NEAR = 1.2
"""A number of columns is of use where the capacity is more than this many times as large."""


def column_steps(capacity: int) -> tuple[int, ...]:
    """The numbers of cache columns that a pass may read: 512, 2048, ... and `capacity`, in rising order. A number just
    below `capacity` is left out: its profiles would cost what any others do, and save a few columns."""
    steps, columns = [], FIRST_COLUMNS
    while columns * NEAR < capacity:
        steps.append(columns)
        columns *= COLUMNS_FACTOR
    return (*steps, capacity)


def prefill_widths(manifest: Manifest, columns: Sequence[int]) -> tuple[int, ...]:
    """The widths of a prompt's chunks that fit the cache, in falling order."""
    return (*wide_chunks(manifest.model, columns[-1:]), *(width for width in PREFILL_WIDTHS if width <= columns[-1]))


def engine_plans(manifest: Manifest) -> list[Plan]:
    """The plans that engines are built for."""
    length = manifest.lookahead.length
    modes = [make_cycle(mode, length) for mode in MODES]
    trees = [plan for plan in manifest.layouts if plan.parents]
    return [*dict.fromkeys(plan for cycle in modes for plan in cycle.plans), *trees]


def widest(manifest: Manifest) -> Plan:
    """The widest of them."""
    return max(engine_plans(manifest), key=lambda plan: plan.width)


def trunk_profiles(
    manifest: Manifest,
    columns: Sequence[int],
    max_batch_size: int = 1,
    least_width: int = 1,
    chunks: Sequence[int] | None = None,
) -> tuple[Profile, ...]:
    """Decoding, then prefill, by rising columns; the first profile that admits a pass serves it. Prompts are read one
    at a time, so larger batches have no profiles for it.

    least_width: windows with fewer rows are padded to it (see `Library.least_width`). chunks: the widths of prefill;
    None is `prefill_widths`.
    """
    adapted = manifest.lookahead.reads_rows
    plans = engine_plans(manifest)
    windows = dict.fromkeys((plan.width, len(plan.lookahead_rows) if adapted else 0) for plan in plans)
    shapes = [_exactly(width=max(q, least_width), logit_rows=q, lookahead_rows=a) for q, a in windows]
    widths = prefill_widths(manifest, columns) if chunks is None else chunks
    prefill = [_exactly(width=q, logit_rows=1, lookahead_rows=0) for q in widths]
    return tuple(
        Profile(sizes=shape | batch | _exactly(columns=read))
        for number, batch in enumerate(_batches(max_batch_size))
        for read in columns
        for shape in (*shapes, *(prefill if number == 0 else ()))
        if shape["width"][0] <= read
    )


def tail_profiles(plan: Plan, capacity: int, max_batch_size: int = 1) -> tuple[Profile, ...]:
    """A profile for every batch."""
    rows = len(plan.lookahead_rows)
    sizes = _exactly(width=plan.width, lookahead_rows=rows, positions=listed_positions(capacity))
    return tuple(Profile(sizes=sizes | batch) for batch in _batches(max_batch_size))


def logprobs_profiles(manifest: Manifest, max_batch_size: int = 1) -> tuple[Profile, ...]:
    """The profiles of the graph of log-probabilities: one for every window but those of trees, and every batch."""
    plans = [plan for plan in engine_plans(manifest) if not plan.parents]
    windows = dict.fromkeys((plan.width, plan.max_emitted) for plan in plans)
    return tuple(
        Profile(sizes=_exactly(width=width, max_emitted=emitted) | batch)
        for batch in _batches(max_batch_size)
        for width, emitted in windows
    )


def processors_profiles(manifest: Manifest, max_batch_size: int = 1) -> tuple[Profile, ...]:
    """The profiles of the graph of logits processors, as `logprobs_profiles` has them; each for lists of touched tokens
    of any length."""
    plans = [plan for plan in engine_plans(manifest) if not plan.parents]
    windows = dict.fromkeys((plan.width, plan.drafts + 1) for plan in plans)
    touched = {"touched": (LIST_SIZES[0], LIST_SIZES[1], LIST_SIZES[-1])}
    return tuple(
        Profile(sizes=_exactly(width=width, processed_rows=rows) | touched | batch)
        for batch in _batches(max_batch_size)
        for width, rows in windows
    )


def _batches(max_batch_size: int) -> list[dict[str, tuple[int, int, int]]]:
    one = [_exactly(batch=1)]
    return one if max_batch_size == 1 else [*one, {"batch": (1, max_batch_size, max_batch_size)}]


def _exactly(**sizes: int) -> dict[str, tuple[int, int, int]]:
    return {name: (size, size, size) for name, size in sizes.items()}
