"""How many tokens a pass of each plan is worth, and the group sizes that are worth most. Pure arithmetic.

`chain[i]` is the probability that drafts 1..i of a row of drafts are all accepted (chain[0] = 1). Drafts of one pass
are taken as independent of those of another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

MAX_DRAFTS = 8
"""Of the shapes that are enumerated."""
EVERY = 3
"""Up to so many drafts every shape is tried: 192 with three. Those that do not fall are worth 11 % more at most, where
falling ones would be taken."""
EXHAUSTIVE = 5
"""Up to so many drafts every falling shape is tried: C(2D, D) of them, 252 with five and 12,870 with eight. With more,
groups are as long as the chain of drafts, or 4, 2, 1 or 0: 495 shapes with eight."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Choice:
    """Group sizes of a fused plan, its expected tokens per pass, and the seconds a pass takes."""

    groups: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def chain_of(rates: Sequence[float]) -> Floats:
    """[L] acceptance rates, each given that the drafts before it were accepted -> [L+1] chain."""
    chain: Floats = np.cumprod(np.array([1.0, *rates]))
    return chain


def accepted_given(drafts: int, chain: Floats) -> Floats:
    """[L+1]: probability that exactly 0..L of `drafts` drafts are accepted."""
    reached = np.where(np.arange(len(chain)) <= drafts, chain, 0.0)
    exactly: Floats = reached - np.append(reached[1:], 0.0)
    return exactly


def fused_tokens(groups: npt.NDArray[np.int64], chain: Floats) -> Floats:
    """[N,D+1] group sizes -> [N] mean tokens per pass.

    The drafts accepted in successive passes are a Markov chain: `a` of them leave groups[a] drafts, of which the next
    pass accepts a' with probability accepted_given(groups[a])[a']. Its stationary distribution x solves x T = x.
    """
    count, depth = groups.shape
    by_drafts = np.stack([accepted_given(k, chain)[:depth] for k in range(depth)])
    equations = np.swapaxes(by_drafts[groups], 1, 2) - np.eye(depth)
    equations[:, -1] = 1.0  # one equation is redundant; the probabilities add up to one
    right = np.zeros((count, depth, 1))
    right[:, -1] = 1.0
    stationary = np.linalg.solve(equations, right)[..., 0]
    tokens: Floats = 1 + stationary @ np.arange(depth)
    return tokens


def two_pass_tokens(drafts: int, chain: Floats) -> float:
    """Mean tokens per pass of draft and verify passes in turn."""
    return 1 + float(chain[1 : drafts + 1].sum()) / 2


@cache
def shapes(drafts: int) -> npt.NDArray[np.int64]:
    """[N,D+1]: choices of group sizes with `drafts` rows after the root.

    All of them up to EVERY drafts. Beyond, falling ones, as deeper groups are used less; and the same with a full last
    group, which pays where whole chains are accepted or nothing is.
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
    """[1,D+1]: all groups as long as the chain of drafts."""
    return np.full((1, drafts + 1), drafts, np.int64)


def best_shape(
    chain: Floats,
    seconds: Callable[[int, int], float],
    max_width: int,
    choices: Callable[[int], npt.NDArray[np.int64]] = shapes,
) -> Choice | None:
    """The fused plan with the most tokens per second; None where none has at most `max_width` rows.

    seconds(width, drafts): of a pass. All drafts up to len(chain) - 1 and MAX_DRAFTS are tried, with what
    choices(drafts) offers.
    """
    chain = np.minimum(chain, np.append(1.0, np.full(len(chain) - 1, 0.999)))  # certainty would part the Markov chain
    best: Choice | None = None
    for drafts in range(1, min(len(chain) - 1, MAX_DRAFTS) + 1):
        groups = choices(drafts)
        widths, kind = np.unique(1 + drafts + groups.sum(1), return_inverse=True)
        cost = np.array([seconds(int(width), drafts) for width in widths])[kind]
        # No pass is worth more than one that always has all drafts: most shapes are too dear to be worth a look.
        worth = chain[: drafts + 1].sum() / cost > (0.0 if best is None else best.rate)
        kept = worth & (widths[kind] <= max_width)
        groups, cost = groups[kept], cost[kept]
        if not len(groups):
            continue
        tokens = fused_tokens(groups, chain)
        at = int((tokens / cost).argmax())
        choice = Choice(tuple(groups[at].tolist()), float(tokens[at]), float(cost[at]))
        if best is None or choice.rate > best.rate:
            best = choice
    return best
