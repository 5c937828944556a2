"""The fastest of all fused plans, by the seconds of passes and the acceptance of drafts:
what a menu is compared with. `cumulative[i]` is the probability that drafts 1..i of a pass are all
accepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from pass_runtime.tuning.estimates import Floats

EVERY = 3
"""Up to this many drafts every shape is tried, 192 with three; with more those whose sizes fall,
and the same with a full last group."""


def fused_tokens(groups: npt.NDArray[np.int64], cumulative: Floats) -> Floats:
    """[N,D+1] group sizes -> [N] expected tokens per pass.

    The numbers of drafts that successive passes accept are a Markov chain: a pass that accepts `a`
    leaves groups[a] drafts, of which the next accepts a' or more with probability cumulative[a'],
    if there are so many. The stationary distribution x of the chain solves x T = x.
    """
    count, depth = groups.shape
    # [drafts, accepted]
    reached = np.where(np.arange(depth) <= np.arange(depth)[:, None], cumulative[:depth], 0.0)
    exactly = reached - np.append(reached[:, 1:], np.zeros((depth, 1)), axis=1)
    equations = np.swapaxes(exactly[groups], 1, 2) - np.eye(depth)
    equations[:, -1] = 1.0  # one equation is redundant; the probabilities add up to one
    right = np.zeros((count, depth, 1))
    right[:, -1] = 1.0
    stationary = np.linalg.solve(equations, right)[..., 0]
    tokens: Floats = 1 + stationary @ np.arange(depth)
    return tokens


@cache
def shapes(drafts: int) -> npt.NDArray[np.int64]:
    """[N,D+1]: the shapes (group sizes) with D = `drafts` draft rows that are tried."""
    if drafts <= EVERY:
        every = itertools.product(range(drafts, -1, -1), repeat=drafts + 1)
        return np.array([groups for groups in every if groups[0]], np.int64)
    tails = itertools.combinations_with_replacement(range(drafts, -1, -1), drafts)
    falling = [(drafts, *tail) for tail in tails]
    again = [(*groups[:-1], drafts) for groups in falling if groups[-1] == 0]
    return np.array([*falling, *again], np.int64)


def best_shape(
    cumulative: Floats, seconds: Callable[[int, int], float]
) -> tuple[float, tuple[int, ...]]:
    """The most tokens per second of any shape, and the shape. seconds(width, drafts): one pass."""
    best: tuple[float, tuple[int, ...]] = (0.0, ())
    for drafts in range(1, len(cumulative)):
        groups = shapes(drafts)
        cost = np.array([seconds(int(width), drafts) for width in 1 + drafts + groups.sum(1)])
        rates = fused_tokens(groups, cumulative) / cost
        best = max(best, (float(rates.max()), tuple(groups[rates.argmax()].tolist())))
    return best
