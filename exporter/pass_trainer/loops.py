"""Finds where texts begin to repeat themselves, in worker processes: the search is pure Python."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache

from pass_runtime.measuring.lossless import loop_start

TASK_TEXTS = 64
"""Texts of a worker's task. One task alone is not worth workers."""
MAX_WORKERS = 8


def loop_starts(texts: Sequence[Sequence[int]]) -> list[int | None]:
    """Return `loop_start` of every text of token ids: the index of the loop, or None."""
    if len(texts) <= TASK_TEXTS:
        return [loop_start(text) for text in texts]
    return list(_workers().map(loop_start, texts, chunksize=TASK_TEXTS))


@cache
def _workers() -> ProcessPoolExecutor:
    # torch's threads forbid a fork
    return ProcessPoolExecutor(
        min(os.cpu_count() or 1, MAX_WORKERS), multiprocessing.get_context("spawn")
    )
