"""Expected tokens per pass of trees of drafts, and the group sizes with the most tokens per second. Pure arithmetic.

`group_sizes` does the same for chains. What is known of a sequence is how often its first choices are accepted; how
often a second or third choice is, follows from that by constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.plan import Plan, full_tree
from pass_runtime.bundle.tree import tree_nodes
from pass_runtime.tuning.group_sizes import Floats, RatedShape

LATER_CHOICES = (0.30, 0.12, 0.07, 0.048, 0.036)
"""Of the places where the first choice is wrong, the shares where the second, third, ... is right: SmolLM2-135M's means
over depths 1 and 2, greedy and at temperature 0.8 (0.23 to 0.37 for the second choice)."""
AFTER_LATER = 0.75
"""How often the first choice after a later one is right, relative to the first choice after a first one."""


def draft_probabilities(drafts: int, lookahead: int, rates: Sequence[float]) -> Floats:
    """[D]: how likely each draft of a tree is accepted, in the order of its rows. rates [L]: conditional acceptance
    of first choices, by depth."""
    found = []
    for node in tree_nodes(drafts, lookahead):
        chance, usual = 1.0, 1.0
        for depth, rank in enumerate(node):
            first = usual * rates[depth]
            chance *= first if rank == 0 else LATER_CHOICES[rank - 1] * (1 - first)
            usual *= 1.0 if rank == 0 else AFTER_LATER
        found.append(chance)
    return np.array(found)


def last_rows(plan: Plan, probabilities: Floats) -> Floats:
    """[depth+1,D+1]: entry (g, a) is the probability that the last accepted draft is in row a (0: none is accepted),
    where the window's drafts are at most g deep."""
    depths, parents = plan.row_position[: plan.drafts + 1], np.array(plan.parents)
    found = np.zeros((plan.depth + 1, plan.drafts + 1))
    for left in range(plan.depth + 1):
        reached = np.append(1.0, probabilities) * (depths <= left)
        found[left] = reached
        np.subtract.at(found[left], parents, reached[1:])
    return np.maximum(found, 0.0)


def tree_tokens(plan: Plan, groups: npt.NDArray[np.int64], probabilities: Floats) -> Floats:
    """[N,D+1] group sizes -> [N] expected tokens per pass.

    How deep the drafts of successive windows are is a Markov chain: a pass whose last accepted draft is in row a leaves
    drafts groups[a] deep. The stationary distribution x of the chain solves x T = x.
    """
    last, states = last_rows(plan, probabilities), plan.depth + 1
    leads = groups[:, :, None] == np.arange(states)  # [N,D+1,depth+1]
    moves = np.einsum("ga,nah->ngh", last, leads)
    equations = np.swapaxes(moves, 1, 2) - np.eye(states)
    equations[:, -1] = 1.0  # one equation is redundant; the probabilities add up to one
    right = np.zeros((len(groups), states, 1))
    right[:, -1] = 1.0
    stationary = np.linalg.solve(equations, right)[..., 0]
    tokens: Floats = 1 + stationary @ (last @ plan.row_position[: plan.drafts + 1])
    return tokens


def tree_groups(plan: Plan, probabilities: Floats) -> npt.NDArray[np.int64]:
    """[N,D+1]: group sizes with 1, 2, ... look-ahead rows in all, each with the rows that promise the most: row j of
    group a is used if a is the last accepted draft's row, and pays if the next tree is accepted that deep."""
    last = last_rows(plan, probabilities)[-1]
    depths = plan.row_position[1 : plan.drafts + 1]
    deep = np.array([probabilities[depths == depth].sum() for depth in range(1, plan.depth + 1)])
    value = last[:, None] * deep  # [D+1,depth]; it falls along a group
    value[0, 0] = np.inf  # a tree has drafts after the root
    order = np.argsort(-value, axis=None, kind="stable")
    added = np.zeros((order.size, *value.shape), np.int64)
    added[np.arange(order.size), *np.unravel_index(order, value.shape)] = 1
    groups: npt.NDArray[np.int64] = added.cumsum(0).sum(2)
    return groups


def best_tree(
    sizes: Sequence[int],
    lookahead: int,
    rates: Sequence[float],
    seconds: Callable[[int, int], float],
    max_width: int,
    rate: float = 0.0,
    *,
    full: bool = False,
) -> RatedShape | None:
    """The tree with the most tokens per second; None where none of at most `max_width` rows has more than `rate`.

    sizes: the numbers of drafts that trees may have. seconds(width, drafts): the time of a pass. full: only trees with
    full groups.
    """
    best: RatedShape | None = None
    for drafts in sizes:
        plan = _full(drafts, lookahead)
        # With a probability of 1 the Markov chain of `tree_tokens` could have several stationary distributions.
        probabilities = np.minimum(draft_probabilities(drafts, lookahead, rates), 0.999)
        groups = np.array([plan.groups]) if full else tree_groups(plan, probabilities)
        widths = 1 + drafts + groups.sum(1)
        groups, widths = groups[widths <= max_width], widths[widths <= max_width]
        if not len(groups):
            continue
        cost = np.array([seconds(int(width), drafts) for width in widths])
        tokens = tree_tokens(plan, groups, probabilities)
        at = int((tokens / cost).argmax())
        choice = RatedShape(tuple(groups[at].tolist()), float(tokens[at]), float(cost[at]))
        if choice.rate > (rate if best is None else best.rate):
            best = choice
    return best


@cache
def _full(drafts: int, lookahead: int) -> Plan:
    return full_tree(drafts, lookahead)
