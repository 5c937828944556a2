from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.errors import PassError
from pass_runtime.options import MAX_STOP_BYTES, MAX_STOPS, GenerateOptions
from pass_runtime.text import detokenizer
from pass_runtime.text.bad_words import Automaton
from pass_runtime.text.detokenizer import StopFilter

QUICK = settings(derandomize=True, deadline=None, max_examples=300)
TEXT = st.text("ab ", max_size=24)  # few letters: stops begin, fail and overlap all the time
STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), max_size=3)


def chunked(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def run_filter(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    filter_, shown = StopFilter(stops), []
    for piece in pieces:
        text, stop = filter_.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, filter_.flush()], None


@QUICK
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=8))
def test_the_text_does_not_depend_on_the_pieces(text, stops, cuts):
    shown, _ = run_filter(chunked(text, cuts), stops)
    shown_by_characters, _ = run_filter(list(text), stops)
    assert "".join(shown) == "".join(shown_by_characters)


@QUICK
@given(text=TEXT, stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(text, stops):
    filter_, shown, pushed = StopFilter(stops), "", ""
    for character in text:
        pushed += character
        piece, stop = filter_.push(character)
        shown += piece
        if stop is not None:
            return
        held = pushed[len(shown) :]
        assert pushed.startswith(shown)
        assert held == "" or any(s != held and s.startswith(held) for s in stops), held


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["one EN", "D. more"], ["END."], "one "),
        (["aaa", "ab"], ["aab"], "aa"),  # the held-back prefix slides along
        (["ab", "cd"], ["bcd", "cde"], "a"),  # two that overlap: the earlier
        (["ab", "cx", "de"], ["bcd", "cxd"], "ab"),  # the earlier fails, the later does not
        (["a", "", "b"], [""], "ab"),  # an empty stop is none
        (["ü😀", "世界"], ["😀世"], "ü"),
    ],
)
def test_shown_texts_by_example(pieces, stops, shown):
    assert "".join(run_filter(pieces, stops)[0]) == shown


def test_flush_returns_held_text_once():
    filter_ = StopFilter(["END"])
    assert filter_.push("the EN") == ("the ", None)
    assert filter_.flush() == "EN"
    assert filter_.flush() == ""


@QUICK
@given(text=TEXT, stops=STOPS, early=st.just(0) | st.integers(0, 24))
def test_a_stop_that_is_complete_within_the_first_characters_is_text(text, stops, early):
    """A stop that is complete later ends the text, also if its first characters are among them."""
    filter_, shown, stop = StopFilter(stops), "", None
    for i, character in enumerate(text):
        piece, stop = filter_.push(character, may_end=i >= early)
        shown += piece
        if stop is not None:
            break
    ends = [
        (end, -len(s), s)
        for s in stops
        for end in range(early + 1, len(text) + 1)
        if text[:end].endswith(s)
    ]
    if ends:
        end, minus_length, expected = min(ends)  # the earliest end, of the longest stop there
        assert (shown, stop) == (text[: end + minus_length], expected)
    else:
        assert (shown + filter_.flush(), stop) == (text, None)


class CountedLookups(dict):
    lookups = 0

    def get(self, *key):
        self.lookups += 1
        return super().get(*key)


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("length", [4, 58_000])
def test_each_character_costs_at_most_two_lookups_whatever_the_stops(monkeypatch, count, length):
    stops = [" " * length + chr(ord("a") + i) for i in range(count)]
    automaton = Automaton(stops)
    automaton._next = transitions = CountedLookups(automaton._next)
    monkeypatch.setattr(detokenizer, "_automaton", lambda _: automaton)
    filter_, text = StopFilter(stops), (" " * 999 + "x") * 60 + " " * 60_000
    for start in range(0, len(text), 4):
        filter_.push(text[start : start + 4])
    assert transitions.lookups <= 2 * len(text)
    assert filter_.flush() == " " * length


def test_an_automaton_is_made_with_two_lookups_a_character(monkeypatch):
    lookups = []
    step = Automaton.step

    def counted(self, state, symbol):
        before = self._next
        self._next = CountedLookups(before)
        try:
            return step(self, state, symbol)
        finally:
            lookups.append(self._next.lookups)
            self._next = before

    monkeypatch.setattr(Automaton, "step", counted)
    words = ["a" * 50 + "b", "a" * 100 + "c", "ab" * 40, "ba" * 40 + "c", "aab" * 30]
    Automaton(words)
    assert 0 < sum(lookups) <= 2 * sum(map(len, words))


def test_stops_are_bounded():
    assert GenerateOptions(stop=["x" * (MAX_STOP_BYTES // MAX_STOPS)] * MAX_STOPS).stop
    message = "stop must be at most 64 strings, of 4096 bytes together"
    for stops in (["x"] * (MAX_STOPS + 1), ["x" * MAX_STOP_BYTES, "y"], "\u4e16" * MAX_STOP_BYTES):
        with pytest.raises(PassError, match=message):
            GenerateOptions(stop=stops)
