from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.bundle.plan import PLAN_NAMES, make_plan
from pass_runtime.bundle.window import (
    MAX_LOOKAHEAD,
    RowKind,
    Window,
    ar_window,
    bundle_windows,
    draft_window,
    fused_window,
    prefill_window,
    verify_window,
)
from pass_runtime.errors import PassError

QUICK = settings(derandomize=True, deadline=None, max_examples=60)
LENGTHS = st.integers(1, MAX_LOOKAHEAD)


@st.composite
def any_window(draw) -> Window:
    drafts = draw(st.integers(0, 8))
    groups = draw(st.lists(st.integers(0, 6), max_size=drafts + 1))
    return Window("any", drafts, tuple(groups))


def ancestors(window: Window, row: int) -> set[int]:
    seen = set()
    while row >= 0:
        seen.add(row)
        row = window.rows[row].parent
    return seen


def group_rows(window: Window) -> list[range]:
    starts = np.cumsum([1 + window.drafts, *window.groups])
    return [range(a, a + size) for a, size in zip(starts, window.groups, strict=False)]


@QUICK
@given(window=any_window())
def test_a_row_sees_itself_and_its_ancestors_only_as_many_as_its_position_says(window):
    mask, positions = window.window_mask, window.row_position
    assert (mask.dtype, mask.shape) == (np.bool_, (window.width, window.width))
    for i in range(window.width):
        assert set(np.flatnonzero(mask[i])) == ancestors(window, i)
    assert positions.dtype == np.int64
    assert positions.tolist() == [row.depth for row in window.rows] == (mask.sum(1) - 1).tolist()


@QUICK
@given(window=any_window())
def test_rows_stand_in_order_root_drafts_groups(window):
    kinds = [row.kind for row in window.rows]
    lookahead = [RowKind.LOOKAHEAD] * sum(window.groups)
    assert kinds == [RowKind.ROOT] + [RowKind.DRAFT] * window.drafts + lookahead
    assert window.width == 1 + window.drafts + sum(window.groups)
    assert window.max_emitted == 1 + window.drafts
    assert window.logit_rows.tolist() == list(range(window.width))
    assert all(row.parent < i for i, row in enumerate(window.rows))


@QUICK
@given(window=any_window())
def test_drafts_are_a_causal_chain_and_a_group_sees_the_drafts_before_it(window):
    """Row i must be at position i, because accepted K/V stay where the row wrote them."""
    chain = 1 + window.drafts
    assert np.array_equal(window.window_mask[:chain, :chain], np.tri(chain, dtype=bool))
    assert not window.window_mask[:chain, chain:].any()
    assert window.row_position[:chain].tolist() == list(range(chain))
    for drafts, rows in enumerate(group_rows(window)):
        for i, row in enumerate(rows):
            seen = set(np.flatnonzero(window.window_mask[row]))
            assert seen == {*range(1 + drafts), *rows[: i + 1]}
            assert window.row_position[row] == drafts + 1 + i


@QUICK
@given(window=any_window(), vocab=st.integers(1, 300_000))
def test_lookahead_ids_of_every_group_count_from_the_end_of_the_vocabulary(window, vocab):
    ids = window.lookahead_ids(vocab)
    assert ids.dtype == np.int64
    assert ids.tolist() == [vocab + i for rows in group_rows(window) for i in range(len(rows))]


@QUICK
@given(length=LENGTHS)
def test_windows_have_the_rows_that_their_names_say(length):
    assert ar_window() == Window("ar", 0, ())
    assert draft_window(length) == Window(f"draft-{length}", 0, (length,))
    assert verify_window(length) == Window(f"verify-{length}", length, ())
    assert (draft_window(length).max_emitted, verify_window(length).max_emitted) == (1, length + 1)
    assert prefill_window(length).width == length
    assert np.array_equal(prefill_window(length).window_mask, np.tri(length, dtype=bool))


@st.composite
def group_sizes(draw) -> list[int]:
    drafts = draw(st.integers(1, MAX_LOOKAHEAD))
    sizes = st.integers(0, drafts)
    return [draw(st.integers(1, drafts)), *draw(st.lists(sizes, min_size=drafts, max_size=drafts))]


@QUICK
@given(length=LENGTHS)
def test_a_bundle_has_the_next_window_and_the_tail_of_each_window(length):
    """The next window verifies as many drafts as the window can leave."""
    windows = {window.name: window for window in bundle_windows(length)}
    assert set(windows) == {"ar"} | {
        f"{kind}-{i}" for kind in ("draft", "verify", "fused") for i in range(1, length + 1)
    } | {f"copy-{drafts}" for drafts in (8, 16) if drafts > length}
    assert len(bundle_windows(length)) == len(windows)
    for window in windows.values():
        assert windows[window.next.name] == window.next
        counts = [window.next_drafts(accepted) for accepted in range(window.drafts + 1)]
        assert window.next.drafts == max(counts)
        assert windows[window.tail] == window


@QUICK
@given(length=LENGTHS)
def test_plans_repeat_and_are_in_the_bundle(length):
    bundle = bundle_windows(length)
    for name in PLAN_NAMES:
        plan = make_plan(name, length)
        assert plan.drafts == (0 if name == "ar" else length)
        for i, window in enumerate(plan.windows):
            assert window.next == plan.windows[(i + 1) % len(plan.windows)]
            assert window in bundle


@QUICK
@given(sizes=group_sizes())
def test_a_group_stands_behind_every_prefix_of_the_drafts(sizes):
    window = fused_window(sizes)
    assert (window.groups, window.drafts) == (tuple(sizes), len(sizes) - 1)
    assert window.next == window and window.is_fused
    assert window.tail == f"fused-{window.drafts}"
    groups = group_rows(window)
    for accepted in range(window.drafts + 1):
        padding = [0] * (window.drafts - window.next_drafts(accepted))
        assert window.draft_rows[accepted].tolist() == [*groups[accepted], *padding]
    full = make_plan("fused", window.drafts).windows[0]
    assert (window.name == full.name) == (window == full)
    assert make_plan("fused:" + ",".join(map(str, sizes)), 1).windows == (window,)


@QUICK
@given(sizes=group_sizes())
def test_narrower_plans_reach_less_far_until_they_are_plain(sizes):
    plan = make_plan("fused:" + ",".join(map(str, sizes)), 1)
    reach = [plan.reach(plan.windows[0])]
    while plan.drafts:
        assert plan.windows[0].drafts == len(plan.windows[0].groups) - 1
        plan = plan.narrower()
        reach.append(plan.reach(plan.windows[0]))
    assert plan.windows == (ar_window(),)
    assert reach == sorted(set(reach), reverse=True)


@pytest.mark.parametrize(
    "shape", ["", "1", "0,1", "2,1", "3,1,1", "2,-1,1", "2,x", "1,1,", "1;1", ",".join("1" * 18)]
)
def test_impossible_groups_are_refused(shape):
    message = r"look-ahead must be 1 to 16|first group|must list group sizes"
    with pytest.raises(PassError, match=message):
        make_plan(f"fused:{shape}", 4)


def test_two_pass_alternates_and_no_lookahead_is_plain_decoding():
    assert [window.name for window in make_plan("two-pass", 3).windows] == ["draft-3", "verify-3"]
    for name in PLAN_NAMES:
        assert (make_plan(name, 0).name, make_plan(name, 0).windows) == ("ar", (ar_window(),))


@pytest.mark.parametrize(
    ("make", "length"),
    [
        *product((draft_window, verify_window), (-1, 0, 17, 1000)),
        # The plan of look-ahead 0 is plain decoding (see above).
        *product((partial(make_plan, "two-pass"), partial(make_plan, "fused")), (-1, 17, 1000)),
    ],
)
def test_lookahead_out_of_range_is_refused(make, length):
    with pytest.raises(PassError, match=f"1 to 16, not {length}$"):
        make(length)


@pytest.mark.parametrize("name", ["", "AR", "two_pass", "nothing"])
def test_unknown_plans_are_refused_by_name_with_the_choice(name):
    with pytest.raises(PassError, match="choose one of ar, two-pass, fused") as error:
        make_plan(name, 3)
    assert repr(name) in str(error.value)
