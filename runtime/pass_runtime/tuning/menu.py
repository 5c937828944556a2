"""The menu of `auto`: the cycles of plans that it chooses from, and the tokens that their passes are expected to write.

Drafts of different passes are taken as independent.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.plan import Cycle, Plan, fused_cycle, make_cycle, tree_cycle
from pass_runtime.bundle.tree import tree_depth, tree_nodes
from pass_runtime.tuning.acceptance import Floats

DRAFTS = (1, 2, 3, 4, 6)
"""The drafts of two-pass cycles and of fused plans, besides as many as there are look-ahead rows."""
TILE = (2, 2, 1)
"""Group sizes that fill a window of 8 rows: processors compute rows by tiles, of 8 or more."""
LATER_CHOICES = (0.30, 0.12, 0.07, 0.048, 0.036)
"""Of the places where the first choice is wrong, the shares where the second, third, ... is right: SmolLM2-135M's means
over depths 1 and 2, greedy and at temperature 0.8 (0.23 to 0.37 for the second choice)."""
AFTER_LATER = 0.75
"""How often the first choice after a later one is right, relative to the first choice after a first one."""
SQUARINGS = 9
"""How often the chain of windows is squared: after 512 steps it is forgotten how they began."""


@cache
def menu(lookahead: int, exactly: int | None = None, trees: tuple[int, ...] = ()) -> tuple[Cycle, ...]:
    """Plain decoding, which comes first, and the cycles whose drafts are at most `lookahead` deep.

    exactly: engines have plans for this number of drafts only, with full groups. trees: the sizes of the trees of
    drafts that there are. Fused plans and trees have two shapes: groups that get smaller with what was accepted, down
    to one row, and full ones.
    """
    deepest = lookahead if exactly is None else min(lookahead, exactly)
    counts = sorted({count for count in (*DRAFTS, deepest) if 0 < count <= deepest})
    shapes = [shape for n in counts for shape in ((*range(n, 0, -1), 1), (n,) * (n + 1))]
    found = [make_cycle("ar", 0), *(make_cycle("two-pass", count) for count in counts)]
    found += map(fused_cycle, dict.fromkeys([*shapes, *[TILE] * (deepest >= 2)]))
    for size in trees:
        if (depth := tree_depth(size)) <= lookahead:
            smaller = [1 if any(node) else max(depth - len(node), 1) for node in tree_nodes(size, lookahead)]
            found += [tree_cycle(groups, lookahead) for groups in ((depth, *smaller), (depth,) * (size + 1))]
    return tuple(cycle for cycle in found if exactly is None or not cycle.lookahead or _is_full(cycle, exactly))


def _is_full(cycle: Cycle, drafts: int) -> bool:
    """Whether all groups are as large as drafts are deep, which is `drafts` but in trees."""
    full = all(size == cycle.lookahead for plan in cycle.plans for size in plan.groups)
    return full and (cycle.is_tree or cycle.lookahead == drafts)


def tokens_of(cycle: Cycle, lookahead: int, cumulative: Floats) -> float:
    """The expected tokens per pass of one sequence.

    lookahead: the bundle's, which decides the form of trees. cumulative [L+1]: the probabilities that the first i
    drafts of a chain are all accepted.
    """
    plan = cycle.plans[0]
    if not plan.is_fused:
        return 1.0 + float(cumulative[1 : cycle.lookahead + 1].sum()) / 2
    accepted = _tree_acceptance(plan.drafts, lookahead, cumulative) if plan.parents else cumulative[1 : plan.drafts + 1]
    return _tokens(plan, accepted)


def _tree_acceptance(drafts: int, lookahead: int, cumulative: Floats) -> Floats:
    """[D]: how likely each draft of a tree is accepted, in the order of its rows."""
    rates = cumulative[1:] / np.maximum(cumulative[:-1], 1e-9)
    found = []
    for node in tree_nodes(drafts, lookahead):
        chance, usual = 1.0, 1.0
        for depth, rank in enumerate(node):
            first = usual * rates[depth]
            chance *= first if rank == 0 else LATER_CHOICES[rank - 1] * (1 - first)
            usual *= 1.0 if rank == 0 else AFTER_LATER
        found.append(chance)
    return np.array(found)


def _tokens(plan: Plan, accepted: Floats) -> float:
    """Expected tokens per pass of a fused plan, whose drafts are accepted with the probabilities `accepted` [D].

    How deep the drafts of successive windows are is a Markov chain: a pass whose last accepted draft is in row a leaves
    drafts groups[a] deep. A step that is taken in half of the cases leads to the same distribution and has no period.
    """
    tried, parents, leads = _layout(plan)
    reached = tried * np.append(1.0, accepted)  # (g, a): row a is accepted if drafts are g deep
    last = reached.copy()
    np.subtract.at(last, (slice(None), parents), reached[:, 1:])  # row a is the last one accepted
    steps = (np.maximum(last, 0.0) @ leads + np.eye(len(last))) / 2
    for _ in range(SQUARINGS):
        steps = steps @ steps
    return 1.0 + float(steps[0] @ reached[:, 1:].sum(1))


@cache
def _layout(plan: Plan) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
    """[depth+1,D+1]: 1 where drafts g deep include row a; [D]: the parent row of each draft; [D+1,depth+1]: 1 where
    group a has g rows."""
    sizes = np.arange(plan.depth + 1)
    tried = plan.row_position[: plan.drafts + 1] <= sizes[:, None]
    leads = np.equal.outer(np.array(plan.groups), sizes)
    return tried.astype(float), np.array(plan.parents or range(plan.drafts), np.int64), leads.astype(float)
