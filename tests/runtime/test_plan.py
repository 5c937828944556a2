"""Plans and cycles. Mask and positions are compared with a second definition of them."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.bundle.plan import (
    MAX_LOOKAHEAD,
    MODES,
    Plan,
    RowKind,
    ar_plan,
    bundle_plans,
    draft_plan,
    fused_plan,
    make_cycle,
    prefill_plan,
    verify_plan,
)
from pass_runtime.errors import PassError

QUICK = settings(derandomize=True, deadline=None, max_examples=60)
LENGTHS = st.integers(1, MAX_LOOKAHEAD)


@st.composite
def any_plan(draw) -> Plan:
    """Any number of drafts and any groups, fused shapes among them."""
    drafts = draw(st.integers(0, 8))
    groups = draw(st.lists(st.integers(0, 6), max_size=drafts + 1))
    return Plan("any", drafts, tuple(groups))


def ancestors(plan: Plan, row: int) -> set[int]:
    """Return the row and all rows above it in the window's tree."""
    seen = set()
    while row >= 0:
        seen.add(row)
        row = plan.rows[row].parent
    return seen


def group_rows(plan: Plan) -> list[range]:
    """The row indices of each look-ahead group."""
    starts = np.cumsum([1 + plan.drafts, *plan.groups])
    return [range(a, a + size) for a, size in zip(starts, plan.groups, strict=False)]


@QUICK
@given(plan=any_plan())
def test_a_row_sees_itself_and_its_ancestors_only(plan):
    mask = plan.window_mask
    assert mask.dtype == np.bool_
    assert mask.shape == (plan.width, plan.width)
    for i in range(plan.width):
        assert set(np.flatnonzero(mask[i])) == ancestors(plan, i)


@QUICK
@given(plan=any_plan())
def test_a_rows_position_is_how_many_other_rows_it_sees(plan):
    """This number is also the row's depth below the root."""
    assert plan.row_position.dtype == np.int64
    assert plan.row_position.tolist() == [row.depth for row in plan.rows]
    assert plan.row_position.tolist() == (plan.window_mask.sum(1) - 1).tolist()


@QUICK
@given(plan=any_plan())
def test_rows_stand_in_order_root_drafts_groups(plan):
    kinds = [row.kind for row in plan.rows]
    lookahead = [RowKind.LOOKAHEAD] * sum(plan.groups)
    assert kinds == [RowKind.ROOT] + [RowKind.DRAFT] * plan.drafts + lookahead
    assert plan.width == 1 + plan.drafts + sum(plan.groups)
    assert plan.max_emitted == 1 + plan.drafts
    assert plan.logit_rows.tolist() == list(range(plan.width))
    assert all(row.parent < i for i, row in enumerate(plan.rows))


@QUICK
@given(plan=any_plan())
def test_drafts_are_a_causal_chain(plan):
    """Row i must be at position i, because accepted K/V stay where the row wrote them."""
    chain = 1 + plan.drafts
    assert np.array_equal(plan.window_mask[:chain, :chain], np.tri(chain, dtype=bool))
    assert not plan.window_mask[:chain, chain:].any()
    assert plan.row_position[:chain].tolist() == list(range(chain))


@QUICK
@given(plan=any_plan())
def test_a_group_sees_the_root_the_drafts_before_it_and_itself(plan):
    for drafts, rows in enumerate(group_rows(plan)):
        for i, row in enumerate(rows):
            seen = set(np.flatnonzero(plan.window_mask[row]))
            assert seen == {*range(1 + drafts), *rows[: i + 1]}
            assert plan.row_position[row] == drafts + 1 + i


@QUICK
@given(plan=any_plan(), vocab=st.integers(1, 300_000))
def test_lookahead_ids_of_every_group_count_from_the_end_of_the_vocabulary(plan, vocab):
    ids = plan.lookahead_ids(vocab)
    assert ids.dtype == np.int64
    assert ids.tolist() == [vocab + i for rows in group_rows(plan) for i in range(len(rows))]


@QUICK
@given(length=LENGTHS)
def test_plans_have_the_rows_that_their_names_say(length):
    assert ar_plan() == Plan("ar", 0, ())
    assert draft_plan(length) == Plan(f"draft-{length}", 0, (length,))
    assert verify_plan(length) == Plan(f"verify-{length}", length, ())
    assert (draft_plan(length).max_emitted, verify_plan(length).max_emitted) == (1, length + 1)
    assert prefill_plan(length).width == length
    assert np.array_equal(prefill_plan(length).window_mask, np.tri(length, dtype=bool))


@st.composite
def group_sizes(draw) -> list[int]:
    drafts = draw(st.integers(1, MAX_LOOKAHEAD))
    sizes = st.integers(0, drafts)
    return [draw(st.integers(1, drafts)), *draw(st.lists(sizes, min_size=drafts, max_size=drafts))]


@QUICK
@given(length=LENGTHS)
def test_a_bundle_has_the_next_plan_and_the_tail_of_each_of_its_plans(length):
    """The next plan verifies as many drafts as the plan can leave."""
    plans = {plan.name: plan for plan in bundle_plans(length)}
    assert set(plans) == {"ar"} | {
        f"{kind}-{i}" for kind in ("draft", "verify", "fused") for i in range(1, length + 1)
    }
    assert len(bundle_plans(length)) == len(plans)
    for plan in plans.values():
        assert plans[plan.next.name] == plan.next
        depths = [plan.next_draft_depth(accepted) for accepted in range(plan.drafts + 1)]
        assert plan.next.drafts == max(depths)
        assert plans[plan.tail] == plan


@QUICK
@given(length=LENGTHS)
def test_cycles_repeat_and_are_in_the_bundle(length):
    bundle = bundle_plans(length)
    for mode in MODES:
        cycle = make_cycle(mode, length)
        assert cycle.depth == (0 if mode == "ar" else length)
        for i, plan in enumerate(cycle.plans):
            assert plan.next == cycle.plans[(i + 1) % len(cycle.plans)]
            assert plan in bundle


@QUICK
@given(sizes=group_sizes())
def test_a_group_stands_behind_every_prefix_of_the_drafts(sizes):
    plan = fused_plan(sizes)
    assert (plan.groups, plan.drafts) == (tuple(sizes), len(sizes) - 1)
    assert plan.next == plan and plan.is_fused
    assert plan.tail == f"fused-{plan.drafts}"
    groups = group_rows(plan)
    for accepted in range(plan.drafts + 1):
        padding = [0] * (plan.drafts - plan.next_draft_depth(accepted))
        assert plan.draft_rows[accepted].tolist() == [*groups[accepted], *padding]
    full = make_cycle("fused", plan.drafts).plans[0]
    assert (plan.name == full.name) == (plan == full)
    assert make_cycle("fused:" + ",".join(map(str, sizes)), 1).plans == (plan,)


@QUICK
@given(sizes=group_sizes())
def test_narrower_cycles_reach_less_far_until_they_are_plain(sizes):
    cycle = make_cycle("fused:" + ",".join(map(str, sizes)), 1)
    reach = [cycle.reach(cycle.plans[0])]
    while cycle.depth:
        assert cycle.plans[0].drafts == len(cycle.plans[0].groups) - 1
        cycle = cycle.narrower()
        reach.append(cycle.reach(cycle.plans[0]))
    assert cycle.plans == (ar_plan(),)
    assert reach == sorted(set(reach), reverse=True)


@pytest.mark.parametrize(
    "shape", ["", "1", "0,1", "2,1", "3,1,1", "2,-1,1", "2,x", "1,1,", "1;1", ",".join("1" * 18)]
)
def test_impossible_groups_are_refused(shape):
    message = r"look-ahead must be 1 to 16|first group|must list group sizes"
    with pytest.raises(PassError, match=message):
        make_cycle(f"fused:{shape}", 4)


def test_two_pass_alternates_draft_and_verify():
    assert [plan.name for plan in make_cycle("two-pass", 3).plans] == ["draft-3", "verify-3"]


def test_no_lookahead_is_plain_decoding():
    for mode in MODES:
        assert (make_cycle(mode, 0).name, make_cycle(mode, 0).plans) == ("ar", (ar_plan(),))


@pytest.mark.parametrize(
    ("make", "length"),
    [
        *product((draft_plan, verify_plan), (-1, 0, 17, 1000)),
        # The cycle of look-ahead 0 is plain decoding (see above).
        *product((partial(make_cycle, "two-pass"), partial(make_cycle, "fused")), (-1, 17, 1000)),
    ],
)
def test_lookahead_out_of_range_is_refused(make, length):
    with pytest.raises(PassError, match=f"1 to 16, not {length}$"):
        make(length)


@pytest.mark.parametrize("mode", ["", "AR", "two_pass", "nothing"])
def test_unknown_modes_are_refused_by_name_with_the_choice(mode):
    with pytest.raises(PassError, match="choose one of ar, two-pass, fused") as error:
        make_cycle(mode, 3)
    assert repr(mode) in str(error.value)
