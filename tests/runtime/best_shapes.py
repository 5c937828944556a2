"""Expected tokens per pass of each plan, and the group sizes with the most tokens per second. Pure arithmetic.

`cumulative[i]` is the cumulative acceptance: the probability that drafts 1..i of a pass are all accepted, with
cumulative[0] = 1. Drafts of different passes are taken as independent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

MAX_DRAFTS = 8
"""The most drafts of the shapes that are enumerated."""
EVERY = 3
"""Up to this many drafts every shape is tried: 192 shapes with three. A shape whose sizes do not fall is worth at most
11 % more than the best one whose sizes do."""
EXHAUSTIVE = 5
"""Up to this many drafts D every shape with falling sizes is tried: C(2D, D) of them, 252 with five and 12,870 with
eight. With more drafts a group has D, 4, 2, 1 or 0 rows: 495 shapes with eight."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RatedShape:
    """Group sizes of a fused plan, its expected tokens per pass, and the seconds a pass takes."""

    groups: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def count_probabilities(drafts: int, cumulative: Floats) -> Floats:
    """[L+1]: the probabilities that exactly 0..L of `drafts` drafts are accepted."""
    reached = np.where(np.arange(len(cumulative)) <= drafts, cumulative, 0.0)
    exactly: Floats = reached - np.append(reached[1:], 0.0)
    return exactly


def fused_tokens(groups: npt.NDArray[np.int64], cumulative: Floats) -> Floats:
    """[N,D+1] group sizes -> [N] expected tokens per pass.

    The numbers of drafts that successive passes accept are a Markov chain: a pass that accepts `a` leaves groups[a]
    drafts, of which the next accepts a' with probability count_probabilities(groups[a])[a']. The stationary
    distribution x of the chain solves x T = x.
    """
    count, depth = groups.shape
    by_drafts = np.stack([count_probabilities(k, cumulative)[:depth] for k in range(depth)])
    equations = np.swapaxes(by_drafts[groups], 1, 2) - np.eye(depth)
    equations[:, -1] = 1.0  # one equation is redundant; the probabilities add up to one
    right = np.zeros((count, depth, 1))
    right[:, -1] = 1.0
    stationary = np.linalg.solve(equations, right)[..., 0]
    tokens: Floats = 1 + stationary @ np.arange(depth)
    return tokens


def two_pass_tokens(drafts: int, cumulative: Floats) -> float:
    """Expected tokens per pass where draft and verify passes alternate."""
    return 1 + float(cumulative[1 : drafts + 1].sum()) / 2


@cache
def shapes(drafts: int) -> npt.NDArray[np.int64]:
    """[N,D+1]: the shapes (group sizes) that are tried with D = `drafts` draft rows.

    Up to EVERY drafts these are all shapes. With more they are the shapes whose sizes fall, since deeper groups are
    used less often, and the same ones with a full last group, which pays where mostly all drafts are accepted or none.
    """
    if drafts <= EVERY:
        every = itertools.product(range(drafts, -1, -1), repeat=drafts + 1)
        return np.array([groups for groups in every if groups[0]], np.int64)
    sizes = range(drafts, -1, -1) if drafts <= EXHAUSTIVE else (drafts, 4, 2, 1, 0)
    tails = itertools.combinations_with_replacement(sizes, drafts)
    falling = [(drafts, *tail) for tail in tails]
    again = [(*groups[:-1], drafts) for groups in falling if groups[-1] == 0 and groups[-2] < drafts]
    return np.array([*falling, *again], np.int64)


def full_shape(drafts: int) -> npt.NDArray[np.int64]:
    """[1,D+1]: every group has D = `drafts` rows."""
    return np.full((1, drafts + 1), drafts, np.int64)


def best_shape(
    cumulative: Floats,
    seconds: Callable[[int, int], float],
    max_width: int,
    choices: Callable[[int], npt.NDArray[np.int64]] = shapes,
    rate: float = 0.0,
) -> RatedShape | None:
    """The fused plan with the most tokens per second; None where none of at most `max_width` rows has more than `rate`.

    seconds(width, drafts): the time of a pass. choices(drafts): the shapes to try, for every number of drafts up to
    len(cumulative) - 1 and MAX_DRAFTS.
    """
    # With a probability of 1 the Markov chain of `fused_tokens` could have several stationary distributions.
    cumulative = np.minimum(cumulative, np.append(1.0, np.full(len(cumulative) - 1, 0.999)))
    best: RatedShape | None = None
    for drafts in range(1, min(len(cumulative) - 1, MAX_DRAFTS) + 1):
        groups = choices(drafts)
        widths, kind = np.unique(1 + drafts + groups.sum(1), return_inverse=True)
        cost = np.array([seconds(int(width), drafts) for width in widths])[kind]
        # No pass writes more tokens than one that always has all drafts, so most shapes are too slow to be the best.
        promising = cumulative[: drafts + 1].sum() / cost > (rate if best is None else best.rate)
        kept = promising & (widths[kind] <= max_width)
        groups, cost = groups[kept], cost[kept]
        if not len(groups):
            continue
        tokens = fused_tokens(groups, cumulative)
        at = int((tokens / cost).argmax())
        choice = RatedShape(tuple(groups[at].tolist()), float(tokens[at]), float(cost[at]))
        if choice.rate > (rate if best is None else best.rate):
            best = choice
    return best
