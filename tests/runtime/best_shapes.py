"""The fused window that writes the most tokens per second, found by trying all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from pass_runtime.tuning.auto import Floats

MAX_EXHAUSTIVE_DRAFTS = 3
"""Up to this many drafts, every shape is tried."""


def fused_tokens(groups: npt.NDArray[np.int64], cumulative: Floats) -> Floats:
    """Return [N], the expected tokens per pass of N shapes, groups [N,D+1]."""
    shape_count, depth = groups.shape
    # [drafts, accepted]: a probability
    at_least = np.where(np.arange(depth) <= np.arange(depth)[:, None], cumulative[:depth], 0.0)
    exactly = at_least - np.append(at_least[:, 1:], np.zeros((depth, 1)), axis=1)
    equations = np.swapaxes(exactly[groups], 1, 2) - np.eye(depth)
    equations[:, -1] = 1.0  # one equation is redundant; the probabilities add up to one
    right = np.zeros((shape_count, depth, 1))
    right[:, -1] = 1.0
    stationary = np.linalg.solve(equations, right)[..., 0]
    tokens: Floats = 1 + stationary @ np.arange(depth)
    return tokens


@cache
def shapes(drafts: int) -> npt.NDArray[np.int64]:
    """Return [N,D+1], the shapes that are tried."""
    sizes = range(drafts, -1, -1)
    if drafts <= MAX_EXHAUSTIVE_DRAFTS:
        every = itertools.product(sizes, repeat=drafts + 1)
        return np.array([groups for groups in every if groups[0]], np.int64)
    falling = [(drafts, *later) for later in itertools.combinations_with_replacement(sizes, drafts)]
    full_last = [(*groups[:-1], drafts) for groups in falling if groups[-1] == 0]
    return np.array([*falling, *full_last], np.int64)


def best_shape(
    cumulative: Floats, seconds: Callable[[int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """Return tokens per second, and the shape. seconds(rows, drafts): of a pass."""
    best: tuple[float, tuple[int, ...]] = (0.0, ())
    for drafts in range(1, len(cumulative)):
        groups = shapes(drafts)
        pass_seconds = [seconds(int(rows), drafts) for rows in 1 + drafts + groups.sum(1)]
        rates = fused_tokens(groups, cumulative) / np.array(pass_seconds)
        best = max(best, (float(rates.max()), tuple(groups[rates.argmax()].tolist())))
    return best
