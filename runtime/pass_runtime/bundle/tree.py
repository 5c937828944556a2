"""Trees of drafts: which second, third, ... choices a tree has beside the chain of first choices.

A tree of N drafts consists of the first N drafts of TREE, which are accepted most often. Its form
is the same for every text, so that masks and positions are constants of a plan, as for chains.
"""

from __future__ import annotations

from collections.abc import Sequence

from pass_runtime.errors import PassError

TREE = (
    *((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (0, 0, 0, 0), (2,), (1, 0)),
    *((0, 0, 1), (0, 1, 0), (3,), (0, 2), (4,), (0, 0, 0, 1), (5,), (1, 1)),
)
"""Drafts by falling rate of acceptance. A draft is given by the ranks of the choices on the path to
it: (0, 1) is the second choice (1) after the root's first choice (0). The order is that of
SmolLM2-135M's answers to 30 prompts at temperatures 0 and 0.8 (docs/studies.md)."""

TREE_SIZES = (3, 5, 8, 16)
"""How many drafts the trees have for which bundles have tails."""


def tree_depth(drafts: int) -> int:
    """Return how many drafts the longest path has in a tree of `drafts` drafts."""
    return max(map(len, TREE[:drafts]))


def tree_sizes(lookahead: int) -> Sequence[int]:
    """Return the sizes, in drafts, of the trees that a bundle with this look-ahead may have."""
    return [size for size in TREE_SIZES if tree_depth(size) <= lookahead]


def tree_nodes(drafts: int, lookahead: int) -> Sequence[tuple[int, ...]]:
    """Return the drafts of a tree, each as in TREE, in the order of their rows: first the chain of
    first choices, so that the K/V of most accepted drafts need not be moved. Raises PassError if
    there is no tree of this size, or if it is deeper than the look-ahead."""
    if drafts not in TREE_SIZES:
        raise PassError(
            f"no tree has {drafts} drafts: trees have {', '.join(map(str, TREE_SIZES))}"
        )
    if (depth := tree_depth(drafts)) > lookahead:
        raise PassError(
            f"a tree of {drafts} drafts needs a look-ahead of {depth} or more, not {lookahead}"
        )
    return sorted(TREE[:drafts], key=any)  # False for the chain, whose ranks are all 0


def tree_parents(drafts: int, lookahead: int) -> tuple[int, ...]:
    """Return the row that each draft of a tree follows, 0 for the root."""
    nodes = list(tree_nodes(drafts, lookahead))
    return tuple(nodes.index(node[:-1]) + 1 if node[:-1] else 0 for node in nodes)
