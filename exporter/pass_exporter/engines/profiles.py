"""Chooses the optimization profiles of engines: the shapes that an engine is tuned for and runs.

The trunk has profiles for the windows (width Q, look-ahead rows A) of all trees, and of the chains
with as many drafts as the bundle allows. Shorter chains have none: a GPU saves nearly nothing by
fewer rows, every profile of SmolLM2 takes seconds to build, and TensorRT-RTX 1.7 cannot build a
profile for a range of widths in fp16. Each window has a profile for every number of cache columns
(entries of a slot's KV cache) that a pass may read, both for one sequence and, if `max_batch_size`
is larger, for up to that many sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from pass_runtime.backends.base import listed_positions
from pass_runtime.backends.memory import wide_chunks
from pass_runtime.bundle.manifest import Manifest, Profile
from pass_runtime.bundle.plan import MODES, Plan, make_cycle
from pass_runtime.bundle.sampling import TOKEN_LIST_SIZES

PREFILL_WIDTHS = (256, 32)
"""The widths of prompt chunks, besides the wider ones of `backends.memory.wide_chunks`."""
MIN_COLUMNS = 512
COLUMNS_FACTOR = 4
"""The smallest number of cache columns that a pass may read is MIN_COLUMNS, and the next is always
COLUMNS_FACTOR times as large."""
MIN_CAPACITY_RATIO = 1.2
"""A number of columns gets profiles only if the capacity is more than this many times as large."""


def column_steps(capacity: int) -> tuple[int, ...]:
    """Return the numbers of cache columns that a pass may read: 512, 2048, ..., `capacity`.

    A number just below `capacity` is left out: its profiles would cost as much as others and save
    few columns.
    """
    steps, columns = [], MIN_COLUMNS
    while columns * MIN_CAPACITY_RATIO < capacity:
        steps.append(columns)
        columns *= COLUMNS_FACTOR
    return (*steps, capacity)


def default_prefill_widths(manifest: Manifest, columns: Sequence[int]) -> tuple[int, ...]:
    """Return the default widths of prompt chunks: those that fit into the cache, in falling
    order. columns: as for `trunk_profiles`."""
    return (
        *wide_chunks(manifest.model, columns[-1:]),
        *(width for width in PREFILL_WIDTHS if width <= columns[-1]),
    )


def engine_plans(manifest: Manifest) -> list[Plan]:
    """Return the plans that engines are built for: those of every mode with the bundle's L, and all
    trees."""
    cycles = [make_cycle(mode, manifest.lookahead.length) for mode in MODES]
    trees = [plan for plan in manifest.layouts if plan.parents]
    return [*dict.fromkeys(plan for cycle in cycles for plan in cycle.plans), *trees]


def widest_plan(manifest: Manifest) -> Plan:
    """Return the one of `engine_plans` whose window has the most rows."""
    return max(engine_plans(manifest), key=lambda plan: plan.width)


def trunk_profiles(
    manifest: Manifest,
    columns: Sequence[int],
    max_batch_size: int = 1,
    least_width: int = 1,
    prefill_widths: Sequence[int] | None = None,
) -> tuple[Profile, ...]:
    """Return the trunk's profiles: those for one sequence first, each by rising columns, because a
    pass uses the first that fits. Those for batches are for decoding alone, because prompts are
    prefilled one at a time.

    columns: the numbers of cache columns that a pass may read, rising; the last is the capacity.
    least_width: windows with fewer rows are padded to this many (see `Library.least_width`).
    prefill_widths: the widths of prompt chunks; None means `default_prefill_widths`.
    """
    needs_rows = manifest.lookahead.needs_lookahead_rows
    plans = engine_plans(manifest)
    windows = dict.fromkeys(
        (plan.width, len(plan.lookahead_rows) if needs_rows else 0) for plan in plans
    )
    decoding = [
        _fixed_sizes(width=max(q, least_width), logit_rows=q, lookahead_rows=a) for q, a in windows
    ]
    widths = default_prefill_widths(manifest, columns) if prefill_widths is None else prefill_widths
    prefill = [_fixed_sizes(width=q, logit_rows=1, lookahead_rows=0) for q in widths]
    batches = _batches(max_batch_size)
    return tuple(
        Profile(sizes=window | batch | _fixed_sizes(columns=count))
        for batch in batches
        for count in columns
        for window in (decoding + prefill if batch is batches[0] else decoding)
        if window["width"][0] <= count
    )


def tail_profiles(plan: Plan, capacity: int, max_batch_size: int = 1) -> tuple[Profile, ...]:
    """Return the profiles of a tail of `plan`, one for each range of batch sizes."""
    rows = len(plan.lookahead_rows)
    sizes = _fixed_sizes(
        width=plan.width, lookahead_rows=rows, positions=listed_positions(capacity)
    )
    return tuple(Profile(sizes=sizes | batch) for batch in _batches(max_batch_size))


def logprobs_profiles(manifest: Manifest, max_batch_size: int = 1) -> tuple[Profile, ...]:
    """Return the profiles of tail.logprobs.onnx: for every range of batch sizes, all windows but
    those of trees, with which it does not run."""
    plans = [plan for plan in engine_plans(manifest) if not plan.parents]
    windows = dict.fromkeys((plan.width, plan.max_emitted) for plan in plans)
    return tuple(
        Profile(sizes=_fixed_sizes(width=width, max_emitted=emitted) | batch)
        for batch in _batches(max_batch_size)
        for width, emitted in windows
    )


def processors_profiles(manifest: Manifest, max_batch_size: int = 1) -> tuple[Profile, ...]:
    """Return the profiles of tail.processors.onnx, for the windows and batch sizes of
    `logprobs_profiles`. Each profile takes lists of any length of the tokens whose logits the
    processors change (`touched`)."""
    plans = [plan for plan in engine_plans(manifest) if not plan.parents]
    windows = dict.fromkeys((plan.width, plan.drafts + 1) for plan in plans)
    touched = {"touched": (TOKEN_LIST_SIZES[0], TOKEN_LIST_SIZES[1], TOKEN_LIST_SIZES[-1])}
    return tuple(
        Profile(sizes=_fixed_sizes(width=width, processed_rows=rows) | touched | batch)
        for batch in _batches(max_batch_size)
        for width, rows in windows
    )


def _batches(max_batch_size: int) -> list[dict[str, tuple[int, int, int]]]:
    """Return the ranges of batch sizes that profiles are for: 1 and, if larger, up to
    `max_batch_size`."""
    one = [_fixed_sizes(batch=1)]
    return one if max_batch_size == 1 else [*one, {"batch": (1, max_batch_size, max_batch_size)}]


def _fixed_sizes(**sizes: int) -> dict[str, tuple[int, int, int]]:
    """Return `Profile.sizes` of sizes that do not vary: (smallest, tuned for, largest) of each."""
    return {name: (size, size, size) for name, size in sizes.items()}
