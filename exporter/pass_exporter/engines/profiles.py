"""Chooses the optimization profiles of engines: the shapes that an engine is tuned for and runs.
Windows of shorter look-aheads have none: fewer rows save a GPU nearly nothing, and TensorRT-RTX 1.7
cannot build a profile for a range of widths in fp16."""

from __future__ import annotations

from collections.abc import Sequence

from pass_runtime.backends.base import listed_positions
from pass_runtime.backends.memory import wide_chunks
from pass_runtime.bundle.manifest import Manifest, Profile
from pass_runtime.bundle.plan import plan_windows
from pass_runtime.bundle.sampling import TOKEN_LIST_SIZES
from pass_runtime.bundle.window import Window

PREFILL_WIDTHS = (256, 32)
"""Besides those of `wide_chunks`."""
MIN_COLUMNS = 512
COLUMNS_FACTOR = 4
MIN_CAPACITY_RATIO = 1.2
"""A number of columns gets profiles only if the capacity is more than this many times as large."""
Sizes = dict[str, tuple[int, int, int]]


def column_steps(capacity: int) -> tuple[int, ...]:
    """Return the numbers of cache columns that a pass may read: 512, 2048, ..., `capacity`."""
    steps, columns = [], MIN_COLUMNS
    while columns * MIN_CAPACITY_RATIO < capacity:
        steps.append(columns)
        columns *= COLUMNS_FACTOR
    return (*steps, capacity)


def default_prefill_widths(manifest: Manifest, columns: Sequence[int]) -> tuple[int, ...]:
    """Return the widths of prompt chunks that fit into the cache, in falling order."""
    return (
        *wide_chunks(manifest.model, columns[-1:]),
        *(width for width in PREFILL_WIDTHS if width <= columns[-1]),
    )


def engine_windows(manifest: Manifest) -> list[Window]:
    return plan_windows(manifest.lookahead.length, manifest.verifying)


def widest_window(manifest: Manifest) -> Window:
    return max(engine_windows(manifest), key=lambda window: window.width)


def trunk_profiles(
    manifest: Manifest,
    columns: Sequence[int],
    max_batch_size: int = 1,
    least_width: int = 1,
    prefill_widths: Sequence[int] | None = None,
) -> tuple[Profile, ...]:
    """Return the trunk's profiles for every window, number of columns (rising: a pass uses the
    first that fits) and range of batch sizes. Those for batches are for decoding alone.
    least_width: narrower windows are padded to it."""
    needs_rows = manifest.lookahead.needs_lookahead_rows
    shapes = dict.fromkeys(
        (window.width, len(window.lookahead_rows) if needs_rows else 0)
        for window in engine_windows(manifest)
    )
    decoding = [
        _fixed_sizes(width=max(q, least_width), logit_rows=q, lookahead_rows=a) for q, a in shapes
    ]
    widths = default_prefill_widths(manifest, columns) if prefill_widths is None else prefill_widths
    prefill = [_fixed_sizes(width=q, logit_rows=1, lookahead_rows=0) for q in widths]
    batches = _batches(max_batch_size)
    return tuple(
        Profile(sizes=rows | batch | _fixed_sizes(columns=count))
        for batch in batches
        for count in columns
        for rows in (decoding + prefill if batch is batches[0] else decoding)
        if rows["width"][0] <= count
    )


def tail_profiles(window: Window, capacity: int, max_batch_size: int = 1) -> tuple[Profile, ...]:
    rows, positions = len(window.lookahead_rows), listed_positions(capacity)
    sizes = _fixed_sizes(width=window.width, lookahead_rows=rows, positions=positions)
    return _profiles([sizes], max_batch_size)


def logprobs_profiles(manifest: Manifest, max_batch_size: int = 1) -> tuple[Profile, ...]:
    shapes = dict.fromkeys((each.width, each.max_emitted) for each in engine_windows(manifest))
    sizes = [_fixed_sizes(width=width, max_emitted=emitted) for width, emitted in shapes]
    return _profiles(sizes, max_batch_size)


def processors_profiles(manifest: Manifest, max_batch_size: int = 1) -> tuple[Profile, ...]:
    """Return the profiles of tail.processors.onnx, for lists of any length of `touched` tokens."""
    shapes = dict.fromkeys((each.width, each.drafts + 1) for each in engine_windows(manifest))
    touched = {"touched": (TOKEN_LIST_SIZES[0], TOKEN_LIST_SIZES[1], TOKEN_LIST_SIZES[-1])}
    sizes = [_fixed_sizes(width=width, processed_rows=rows) | touched for width, rows in shapes]
    return _profiles(sizes, max_batch_size)


def _profiles(shapes: Sequence[Sizes], max_batch_size: int) -> tuple[Profile, ...]:
    return tuple(
        Profile(sizes=sizes | batch) for batch in _batches(max_batch_size) for sizes in shapes
    )


def _batches(max_batch_size: int) -> list[Sizes]:
    one = [_fixed_sizes(batch=1)]
    return one if max_batch_size == 1 else [*one, {"batch": (1, max_batch_size, max_batch_size)}]


def _fixed_sizes(**sizes: int) -> Sizes:
    return {name: (size, size, size) for name, size in sizes.items()}
