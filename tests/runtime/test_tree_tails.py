"""Tails of trees, compared with numpy: the drafts that are accepted are a path from the root, and
those of the next tree come from the group after the path's last draft.

Where the graph takes another draft than numpy does, the two must be a near-tie of float32 rounding.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from aliasing import late_readers
from hypothesis import given, settings
from hypothesis import strategies as st
from tail_oracle import NEAR_TIE, group_at, oracle_samples, sampling_params
from tail_runs import (
    HIDDEN,
    POSITIONS,
    PRUNED_TREES,
    TREES,
    open_graph,
    random_head,
    run_graph,
    run_in_place,
    run_tail,
)

from pass_exporter.tails.definitions import adjusted_logits
from pass_exporter.tails.match import build_tail
from pass_runtime.bundle.plan import Plan, full_tree, fused_plan
from pass_runtime.bundle.reference import gumbel_scores
from pass_runtime.bundle.sampling import SAMPLERS, SamplingParams

VOCAB = 1024


def path_to(plan: Plan, row: int) -> list[int]:
    """Return the rows from the root to a draft, both included."""
    path = [row]
    while path[0]:
        path.insert(0, plan.rows[path[0]].parent)
    return path


def plant_path(plan: Plan, samples: list[int], last: int, rng) -> np.ndarray:
    """Return drafts that are right on the path to row `last`, and no others that follow a row of
    this path."""
    path = path_to(plan, last)
    ids = np.zeros(plan.drafts, np.int64)
    for row in range(1, plan.drafts + 1):
        right = samples[plan.rows[row].parent]
        ids[row - 1] = right if row in path else (right + 1 + rng.integers(0, VOCAB - 1)) % VOCAB
    return ids


LEAST_SCORE = float(np.log(np.finfo(np.float32).tiny))
"""The log of the smallest normal float32. Scores are logarithms of what the graph compares."""


def check_tree(
    plan: Plan, logits, hidden, window: list[int], length: int, last: int, params: SamplingParams
) -> None:
    """Assert that in the next window, the drafts that follow each row are the likeliest ones there,
    in this order. window: its ids. last: the last accepted row of the pass."""
    group = group_at(plan, last)
    tokens = dict(enumerate(window[: plan.drafts + 1]))
    states = hidden[np.array(group, np.int64) - (plan.width - len(plan.lookahead_rows))]
    root_depth = plan.rows[last].depth + 1  # of the new root, in the old window
    for row in range(plan.drafts + 1):
        children = [child for child, parent in enumerate(plan.parents, 1) if parent == row]
        depth = plan.rows[row].depth
        if depth >= len(group):
            # No row of the group is that deep.
            assert all(tokens[child] == VOCAB for child in children)
            continue
        before = np.array([[tokens[each] for each in path_to(plan, row)]])
        group_states, group_logits = states[None, : depth + 1], logits[group][None, : depth + 1]
        adjusted = adjusted_logits(random_head(VOCAB), group_states, group_logits, before)
        position = np.array([length + root_depth + depth + 1])
        scores = gumbel_scores(adjusted[:, depth], position, params)[0]
        ranked = np.sort(scores)[::-1]
        choices = [tokens[child] for child in children]
        assert len(set(choices)) == len(choices)
        for rank, (token, best) in enumerate(zip(choices, ranked, strict=False)):
            # Where the best score left is so low, the probabilities of all tokens left are 0 in
            # float32, and the graph may take any of them: none will be accepted.
            is_choice_free = best < LEAST_SCORE
            assert is_choice_free or abs(scores[token] - best) < NEAR_TIE, (plan.name, row, rank)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_any_batch_of_trees_gets_what_numpy_gives_it(sampler, data):
    plan = data.draw(st.sampled_from([*TREES, *PRUNED_TREES]))
    active = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
    params = [data.draw(sampling_params(sampler)) for _ in active]
    last = [data.draw(st.integers(0, plan.drafts)) for _ in active]
    rng, batch = np.random.default_rng(data.draw(st.integers(0, 2**32))), len(active)
    spread = data.draw(st.sampled_from([0.5, 3.0, 12.0]))
    logits = rng.normal(0, spread, (batch, plan.width, VOCAB)).astype(np.float32)
    hidden = rng.standard_normal((batch, sum(plan.groups), HIDDEN)).astype(np.float32)
    length = rng.integers(0, POSITIONS - plan.width - 1, batch)
    ids = rng.integers(0, VOCAB, (batch, plan.width))
    samples = [oracle_samples(plan, logits[b], int(length[b]), own) for b, own in enumerate(params)]
    for b in range(batch):
        ids[b, 1 : 1 + plan.drafts] = plant_path(plan, samples[b], last[b], rng)
    run = data.draw(st.sampled_from([run_graph, run_in_place]))
    options = {"active": active, "hidden": hidden, "run": run}
    out = run_tail(plan, sampler, logits, ids.copy(), length, params, **options)
    for b, own in enumerate(params):
        if not active[b]:
            assert (out["count"][b], out["next_length"][b]) == (0, length[b])
            np.testing.assert_array_equal(out["next_ids"][b], ids[b])
            continue
        path = path_to(plan, last[b])
        assert out["count"][b] == len(path)
        assert out["next_length"][b] == length[b] + len(path)
        assert out["emitted_rows"][b, : len(path)].tolist() == path
        assert out["emitted"][b, : len(path)].tolist() == [samples[b][row] for row in path]
        window = out["next_ids"][b].tolist()
        assert window[0] == samples[b][path[-1]]
        assert window[1 + plan.drafts :] == plan.lookahead_ids(VOCAB).tolist()
        check_tree(plan, logits[b], hidden[b], window, int(length[b]), last[b], own)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(0.7, seed=3), SamplingParams(0.7, 40, seed=3)],
    ids=str,
)
def test_the_chain_of_first_choices_is_that_of_a_fused_pass(params):
    """If the groups have the same logits, the tree's drafts 1 to 4, its chain of first choices, are
    those of the fused pass."""
    windows, rng = [], np.random.default_rng(7)
    group = rng.normal(0, 3, (4, VOCAB)).astype(np.float32)
    hidden = rng.standard_normal((4, HIDDEN)).astype(np.float32)
    for plan in (full_tree(8, 4), fused_plan([4] * 5)):
        logits = np.zeros((1, plan.width, VOCAB), np.float32)
        logits[0, 0, 5] = 50
        logits[0, group_at(plan, 0)] = group
        states = np.zeros((1, sum(plan.groups), HIDDEN), np.float32)
        states[0, :4] = hidden
        ids = np.full((1, plan.width), VOCAB)
        out = run_tail(plan, params.sampler, logits, ids, np.array([3]), [params], hidden=states)
        windows.append(out["next_ids"][0, :5].tolist())
    assert windows[0] == windows[1]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("plan", TREES, ids=lambda plan: plan.name)
def test_tails_of_trees_can_be_captured_and_share_memory(plan, sampler):
    """Outputs may lie in the memory of inputs, and a CUDA graph can capture every operator."""
    graph = build_tail(plan, sampler, VOCAB, random_head(VOCAB)).graph
    assert not late_readers(graph)
    operators = {node.op_type for node in graph}
    assert not operators & {"GatherND", "ScatterND", "NonZero", "If", "Loop", "Mod"}


@pytest.mark.parametrize(("vocab", "head"), [(1024, False), (24, True), (1501, True)])
def test_a_tree_needs_a_draft_head_with_candidate_tokens(vocab, head):
    """Vocabularies of too few blocks, or whose last block is not full, have none."""
    with pytest.raises(ValueError, match="needs a draft head"):
        build_tail(full_tree(3, 2), "greedy", vocab, random_head(vocab) if head else None)


def test_the_last_accepted_row_does_not_depend_on_which_of_equal_values_argmax_takes():
    """ONNX's ArgMax takes the first, and engines may take any; here it takes the last."""
    plan, params, rng = full_tree(8, 4), SamplingParams(), np.random.default_rng(5)
    model = build_tail(plan, "greedy", VOCAB, random_head(VOCAB))
    maxima = (node for node in model.graph if node.op_type == "ArgMax")
    (node,) = (node for node in maxima if node.inputs[0].producer().op_type == "Pad")
    node.attributes["select_last_index"] = ir.AttrInt64("select_last_index", 1)
    session = open_graph(model)
    logits = rng.normal(0, 3, (1, plan.width, VOCAB)).astype(np.float32)
    hidden = rng.standard_normal((1, sum(plan.groups), HIDDEN)).astype(np.float32)
    samples = oracle_samples(plan, logits[0], 3, params)
    for last in (0, 1, plan.drafts):
        ids = rng.integers(0, VOCAB, (1, plan.width))
        ids[0, 1 : 1 + plan.drafts] = plant_path(plan, samples, last, rng)
        length, run = np.array([3]), lambda _, feed: run_graph(session, feed)
        out = run_tail(plan, "greedy", logits, ids, length, [params], hidden=hidden, run=run)
        path = path_to(plan, last)
        assert out["emitted_rows"][0, : len(path)].tolist() == path and out["count"][0] == len(path)
        assert out["next_ids"][0, 0] == samples[path[-1]]
