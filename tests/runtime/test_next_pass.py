"""The next pass fits the KV cache and holds its drafts; n-gram drafts are those of a search."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import fixed_times

from pass_runtime.backends.base import Capabilities, Drafts
from pass_runtime.bundle.plan import make_plan
from pass_runtime.bundle.window import COPY_DRAFTS, Window, ar_window, copy_window, verify_window
from pass_runtime.decode.next_pass import Proposed, Situation
from pass_runtime.tuning.auto import Rates, Tuner

L = 6
PLANS = ("ar", "two-pass", "fused", "fused:3,1,0,2", "fused:1,0", "fused:2,2,1")
NOTHING = Proposed(None)


@st.composite
def capabilities(draw: st.DrawFn) -> Capabilities:
    lookahead = draw(st.sampled_from([None, None, 2, 4, L]))
    least, longest = draw(st.sampled_from([1, 1, 8, 16])), draw(st.integers(0, 2))
    first = 1 if lookahead is None else lookahead
    verifying = map(verify_window, range(first, (lookahead or L) + 1))
    return Capabilities(
        "test",
        320,
        (256,),
        (64, 1),
        fixed_lookahead=lookahead,
        least_width=least,
        verifying=(*verifying, *map(copy_window, COPY_DRAFTS[:longest])),
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[Situation, list[Proposed]]:
    able = draw(capabilities())
    names, lookaheads = st.sampled_from(PLANS), st.integers(0, L)
    if able.fixed_lookahead is not None:
        names, lookaheads = st.sampled_from(PLANS[:3]), st.sampled_from([0, able.fixed_lookahead])
    plan = make_plan(draw(names), draw(lookaheads))
    longest = able.fixed_lookahead or L
    windows = [ar_window(), *plan.windows, *plan.narrower().windows, verify_window(longest)]
    allowed = [window for window in windows if able.allows([window])]
    staged: Window | None = draw(st.sampled_from([None, *allowed]))
    texts = st.lists(st.integers(0, 319), min_size=1, max_size=16).map(tuple)
    drafts = st.one_of(st.none(), st.builds(Drafts, texts, st.just("ngram"), st.integers(0, 5)))
    count, advice = draw(st.integers(1, 4)), None
    rates: Rates | None = None
    if draw(st.booleans()):
        row = draw(st.sampled_from([0.0, 0.05, 1.0]))
        tuner = Tuner(fixed_times({1: 1.0, 65: 1.0 + 64 * row}), L, (0.6, 0.4))
        advice, rates = (tuner, tuner.decide(L)), Rates(tuner.rates)
    left = st.integers(0, staged.drafts if staged else 0)
    proposed = [Proposed(draw(drafts), draw(left), rates) for _ in range(count)]
    return Situation(plan, staged, draw(st.integers(0, 70)), able, count, advice), proposed


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=400)
@given(drawn=situations())
def test_the_next_pass_fits_and_holds_its_drafts(drawn: tuple[Situation, list[Proposed]]):
    situation, proposed = drawn
    able, room = situation.capabilities, situation.room
    next_pass = situation.next_pass(proposed)
    if next_pass is None:
        assert able.padded_width(ar_window().width) > room
        return
    window, written = next_pass
    assert able.padded_width(window.width) <= room
    assert able.allows([window])
    assert len(written) == len(proposed)
    for drafts, each in zip(written, proposed, strict=True):
        if drafts is not None:
            assert 0 < len(drafts.tokens) <= window.drafts
            assert each.drafts.tokens[: len(drafts.tokens)] == drafts.tokens
    if window != situation.staged and not any(written):
        # A plan begins with a window that needs no drafts, and it fits as a whole.
        assert window.width == 1 or window.groups
        assert window.max_emitted <= max(each.max_emitted for each in situation.plan.windows)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(name=st.sampled_from(PLANS), lookahead=st.integers(1, L), room=st.integers(1, 60))
def test_drafts_of_a_plan_are_always_verified(name, lookahead, room):
    """A window with drafts that fits is the next pass, up to the end of the capacity."""
    able = Capabilities("test", 320, (256,), (64, 1))
    plan, window = make_plan(name, lookahead), None
    while next_pass := Situation(plan, window, room, able).next_pass([NOTHING]):
        if window is not None and window.drafts and not window.is_fused:
            assert next_pass[0] == window
        window, room = next_pass[0].next, room - 1  # no draft is accepted
    assert room == 0
