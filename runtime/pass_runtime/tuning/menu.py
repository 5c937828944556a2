"""The menu of `auto`: the cycles that it chooses from, and the tokens that their passes are expected to write."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.base import Capabilities
from pass_runtime.bundle.plan import Cycle, Plan, fused_cycle, make_cycle, tree_cycle
from pass_runtime.bundle.tree import tree_depth, tree_nodes
from pass_runtime.tuning.acceptance import Floats
from pass_runtime.tuning.pass_times import TILES

DRAFTS = (1, 2, 3, 4, 6)
"""The drafts of two-pass cycles and of fused plans, besides as many as there are look-ahead rows."""
LATER_CHOICES = (0.30, 0.12, 0.07, 0.048, 0.036)
"""Of the places where the first choice is wrong, the shares where the second, third, ... is right: SmolLM2-135M's means
over depths 1 and 2, greedy and at temperature 0.8 (0.23 to 0.37 for the second choice)."""
AFTER_LATER = 0.75
"""How often the first choice after a later one is right, relative to the first choice after a first one."""
SQUARINGS = 9
"""After 2^9 windows it is forgotten how the first one began."""


@cache
def menu(lookahead: int, able: Capabilities | None = None) -> tuple[Cycle, ...]:
    """Plain decoding, which comes first, and the cycles that are at most `lookahead` drafts deep.

    Fused plans and trees have full groups, or groups that get smaller with what was accepted, down to one row. able:
    the engines that there are; None has any plan but trees.
    """
    if able is not None and able.lookahead is not None:
        lookahead = min(lookahead, able.lookahead)
    counts = sorted({count for count in (*DRAFTS, lookahead) if 0 < count <= lookahead})
    shapes = [groups for n in counts for groups in ((*range(n, 0, -1), 1), (n,) * (n + 1))]
    shapes += [groups for groups in TILES if len(groups) <= lookahead + 1]
    found = [make_cycle("ar", 0), *(make_cycle("two-pass", count) for count in counts)]
    found += map(fused_cycle, dict.fromkeys(shapes))
    for size in () if able is None else able.exact_trees:
        if (depth := tree_depth(size)) <= lookahead:
            smaller = [1 if any(node) else max(depth - len(node), 1) for node in tree_nodes(size, lookahead)]
            found += [tree_cycle(groups, lookahead) for groups in ((depth, *smaller), (depth,) * (size + 1))]
    return tuple(cycle for cycle in found if able is None or able.allows(cycle.plans))


def tokens_of(cycle: Cycle, cumulative: Floats) -> float:
    """The expected tokens per pass of one sequence, if drafts of different passes are independent. cumulative [L+1]:
    the probabilities that the first i drafts of a chain are all accepted."""
    plan = cycle.plans[0]
    if not plan.is_fused:
        return 1.0 + float(cumulative[1 : cycle.lookahead + 1].sum()) / 2
    accepted = np.append(1.0, _tree_acceptance(plan, cumulative)) if plan.parents else cumulative[: plan.drafts + 1]
    tried, parents, leads = _layout(plan)
    reached = tried * accepted  # (g, a): row a is accepted if the window's drafts are g deep
    last = reached.copy()
    np.subtract.at(last.T, parents, reached[:, 1:].T)  # row a is the last one that is accepted
    # How deep drafts are is a Markov chain: after row a they are groups[a] deep. A chain that stays where it is in half
    # of its steps has the same distribution in the end, and no period.
    steps = (np.maximum(last, 0.0) @ leads + np.eye(len(last))) / 2
    for _ in range(SQUARINGS):
        steps = steps @ steps
    return 1.0 + float(steps[0] @ reached[:, 1:].sum(1))


@cache
def _layout(plan: Plan) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
    """[depth+1,D+1]: 1 where drafts g deep include row a; [D]: the row before each draft; [D+1,depth+1]: 1 where group
    a has g rows."""
    sizes = np.arange(plan.depth + 1)
    tried = plan.row_position[: plan.drafts + 1] <= sizes[:, None]
    leads = np.equal.outer(np.array(plan.groups), sizes)
    return tried.astype(float), np.array(plan.parents or range(plan.drafts), np.int64), leads.astype(float)


def _tree_acceptance(plan: Plan, cumulative: Floats) -> list[float]:
    """[D]: how likely each draft of a tree is accepted, in the order of its rows."""
    found, rates = [], cumulative[1:] / np.maximum(cumulative[:-1], 1e-9)
    for node in tree_nodes(plan.drafts, plan.depth):
        chance, usual = 1.0, 1.0
        for depth, rank in enumerate(node):
            first = usual * float(rates[depth])
            chance *= first if rank == 0 else LATER_CHOICES[rank - 1] * (1 - first)
            usual *= 1.0 if rank == 0 else AFTER_LATER
        found.append(chance)
    return found
