"""Training windows: what every look-ahead row sees, where it stands, and what it has to predict."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.bundle.plan import Plan, draft_plan
from pass_trainer.windows import full_groups, make_windows, sample_groups


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 8), st.data())
def test_a_batch_is_laid_out_as_plans(width: int, batch: int, lookahead: int, data: st.DataObject):
    """Each sequence, as long as the batch or shorter, is a plan: its tokens are the root and the
    drafts."""
    sizes = st.lists(st.integers(0, lookahead), min_size=1, max_size=width)
    groups = [np.array(data.draw(sizes)) for _ in range(batch)]
    windows = make_windows(groups, width)
    plans = [Plan("train", width - 1, tuple(each.tolist())) for each in groups]
    rows = max([1, *(plan.width - width for plan in plans)])
    assert windows.mask.shape == (batch, 1, rows, width + rows)
    valid = np.zeros((batch, rows), np.bool_)
    valid.flat[windows.rows.numpy()] = True
    for b, plan in enumerate(plans):
        used = plan.width - width
        assert valid[b].tolist() == [True] * used + [False] * (rows - used)
        assert windows.anchors[b] == np.count_nonzero(groups[b])
        assert windows.lookahead_index[b].tolist() == plan.lookahead_ids(0).tolist() + [0] * (
            rows - used
        )
        assert windows.position[b].tolist() == plan.row_position[width:].tolist() + [0] * (
            rows - used
        )
        expected = np.zeros((rows, width + rows), np.bool_)
        expected[:used, : plan.width] = plan.window_mask[width:]
        expected[used:, 0] = True
        np.testing.assert_array_equal(windows.mask[b, 0].numpy(), expected)


@settings(deadline=None)
@given(st.integers(2, 40), st.integers(1, 6), st.data())
def test_rows_see_their_prefix_and_their_own_group(
    length: int, lookahead: int, data: st.DataObject
):
    sizes = data.draw(st.lists(st.integers(0, lookahead), min_size=length, max_size=length))
    windows = make_windows([np.array(sizes)], length)
    rows = [(anchor, i) for anchor, size in enumerate(sizes) for i in range(size)]
    assert windows.rows.tolist() == list(range(len(rows)))
    for row, (anchor, i) in enumerate(rows):
        assert windows.lookahead_index[0, row] == i
        assert windows.position[0, row] == anchor + 1 + i
        seen = set(windows.mask[0, 0, row].nonzero().flatten().tolist())
        assert seen == set(range(anchor + 1)) | {
            length + r for r, (a, j) in enumerate(rows) if a == anchor and j <= i
        }


def test_a_group_is_what_the_draft_plan_runs():
    """One anchor at the last token: the look-ahead rows of `draft-3`, shifted by the committed
    tokens."""
    windows, plan = make_windows([np.array([0, 0, 0, 0, 3])], 5), draft_plan(3)
    assert windows.lookahead_index[0].tolist() == plan.lookahead_ids(0).tolist()
    assert (windows.position[0] - 4).tolist() == plan.row_position[1:].tolist()
    assert windows.mask[0, 0, :, 4:].numpy().tolist() == plan.window_mask[1:].tolist()
    assert windows.mask[0, 0, :, :4].all()


def test_padding_is_no_row_and_sees_something():
    windows = make_windows([np.array([2, 0, 0]), np.array([1, 1, 1])], 3)
    assert windows.rows.tolist() == [0, 1, 3, 4, 5] and windows.anchors.tolist() == [1, 3]
    assert windows.mask.any(-1).all()


@settings(deadline=None)
@given(
    st.integers(0, 1000),
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 8),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_sampled_groups_stay_inside(
    seed: int, length: int, anchors: int, lookahead: int, decay: float
):
    rng = np.random.default_rng(seed)
    prompt = int(rng.integers(0, length + 1))
    groups = sample_groups(rng, prompt, length, anchors, lookahead, decay)
    assert len(groups) == length
    places = [a for a, size in enumerate(groups) if size]
    assert len(places) == min(anchors, max(0, length - 1 - max(prompt - 1, 0)))
    assert all(
        a >= prompt - 1 and a + groups[a] <= length - 1 and groups[a] <= lookahead for a in places
    )


def test_rows_are_thinned_by_depth():
    rng = np.random.default_rng(0)
    sizes = np.array([sample_groups(rng, 0, 200, 1, 4, 0.8) for _ in range(4000)]).max(1)
    shares = [(sizes > i).mean() for i in range(4)]
    np.testing.assert_allclose(shares, [1, 0.8, 0.64, 0.512], atol=0.05)


def test_full_groups_have_room():
    assert full_groups(3, 12, 3, 4).tolist() == [0, 0, 4, 0, 0, 4, 0, 0, 0, 0, 0, 0]
    assert not full_groups(1, 4, 1, 4).any() and not full_groups(3, 2, 1, 4).any()
