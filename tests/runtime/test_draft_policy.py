"""`Situation.next_pass`: the next pass fits the KV cache and holds its drafts, and there is a next
pass as long as plain decoding fits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import fixed_times

from pass_runtime.backends.base import Capabilities
from pass_runtime.bundle.plan import Plan, ar_plan, make_cycle, verify_plan
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.draft_policy import DraftPolicy, ExpectedRate, NextPass, Situation
from pass_runtime.decode.sequence import Request, SequenceState, Slot
from pass_runtime.tuning.tuner import Tuner

L = 6
MODES = ("ar", "two-pass", "fused", "fused:3,1,0,2", "fused:1,0", "fused:2,2,1")


@st.composite
def capabilities(draw: st.DrawFn) -> Capabilities:
    lookahead = draw(st.sampled_from([None, None, 2, 4, L]))
    least = draw(st.sampled_from([1, 1, 8, 16]))
    return Capabilities("test", 320, (256,), (64, 1), fixed_lookahead=lookahead, least_width=least)


def slots_with(
    left: st.SearchStrategy[int], texts: st.SearchStrategy[tuple[int, ...]]
) -> st.SearchStrategy[Slot]:
    request = Request((1, 2), SamplingParams(), 8, "auto", None, L, L, frozenset())
    sequences = st.builds(SequenceState, st.just(request))
    return st.builds(
        Slot, st.just(0), sequences, num_drafts=left, ngram=texts, match_length=st.integers(2, 4)
    )


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    able = draw(capabilities())
    modes, lookaheads = st.sampled_from(MODES), st.integers(0, L)
    if able.fixed_lookahead is not None:
        modes, lookaheads = st.sampled_from(MODES[:3]), st.sampled_from([0, able.fixed_lookahead])
    cycle = make_cycle(draw(modes), draw(lookaheads))
    longest = able.fixed_lookahead or L
    plans = [ar_plan(), *cycle.plans, *cycle.narrower().plans, verify_plan(longest)]
    allowed = [plan for plan in plans if able.allows([plan])]
    window: Plan | None = draw(st.sampled_from([None, *allowed]))
    texts = st.lists(st.integers(0, 319), max_size=L).map(tuple)
    left = window.drafts if window else 0
    states = draw(st.lists(slots_with(st.integers(0, left), texts), min_size=1, max_size=4))
    policy = DraftPolicy()
    if draw(st.booleans()):
        row = draw(st.sampled_from([0.0, 0.05, 1.0]))
        tuner = Tuner(fixed_times({1: 1.0, 65: 1.0 + 64 * row}), L, (0.6, 0.4))
        policy = ExpectedRate(tuner, tuner.decide(L), len(states))
    return Situation(cycle, window, draw(st.integers(0, 70)), able, states, policy)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=400)
@given(situation=situations())
def test_the_next_pass_fits_and_holds_its_drafts(situation: Situation):
    able, room = situation.capabilities, situation.room
    next_pass = situation.next_pass()
    if next_pass is None:
        assert able.padded_width(ar_plan().width) > room
        return
    plan, drafts_by_slot = next_pass
    assert able.padded_width(plan.width) <= room
    assert able.allows([plan])
    assert len(drafts_by_slot) == len(situation.slots)
    for drafts, slot in zip(drafts_by_slot, situation.slots, strict=True):
        if drafts is not None:
            assert 0 < len(drafts) <= plan.drafts
            assert slot.ngram[: len(drafts)] == drafts
    is_staged = plan == situation.staged_plan
    if not is_staged and all(drafts is None for drafts in drafts_by_slot):
        # A cycle begins with a plan that needs no drafts, and it fits as a whole.
        assert plan.width == 1 or plan.groups
        assert plan.max_emitted <= max(plan.max_emitted for plan in situation.cycle.plans)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(mode=st.sampled_from(MODES), lookahead=st.integers(1, L), room=st.integers(1, 60))
def test_drafts_of_a_cycle_are_always_verified(mode, lookahead, room):
    """A window with drafts that fits is the next pass, up to the end of the capacity."""
    able = Capabilities("test", 320, (256,), (64, 1))
    cycle, window = make_cycle(mode, lookahead), None
    while next_pass := Situation(cycle, window, room, able, [Slot(0)], DraftPolicy()).next_pass():
        if window is not None and window.drafts and not window.is_fused:
            assert next_pass[0] == window
        window, room = next_pass[0].next, room - 1  # no draft is accepted
    assert room == 0


def test_ngram_drafts_need_room_for_a_padded_window():
    """Engines pad narrow windows: a plan of 3 rows writes 16 entries of the cache."""
    able = Capabilities("test", 320, (256,), (64, 1), least_width=16)
    slot = Slot(0, ngram=(5, 6), match_length=3)

    def next_pass(room: int) -> NextPass | None:
        return Situation(make_cycle("ar", 0), None, room, able, [slot], DraftPolicy()).next_pass()

    assert next_pass(10) is None
    assert next_pass(16) == (verify_plan(2), ((5, 6),))
