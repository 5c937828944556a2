from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.decode.sequence import MAX_GRAM_TOKENS, MIN_GRAM_TOKENS, NgramIndex


def search(tokens: list[int], count: int) -> tuple[int, tuple[int, ...]]:
    """Return (match_length, drafts): the longest suffix that also occurs earlier, and the `count`
    tokens that follow its newest earlier occurrence."""
    for size in range(MAX_GRAM_TOKENS, MIN_GRAM_TOKENS - 1, -1):
        suffix = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(suffix) == size and tokens[end - size : end] == suffix:
                text = list(tokens)
                for i in range(count):
                    text.append(text[end + i])
                return size, tuple(text[len(tokens) :])
    return 0, ()


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=40), cut=st.integers(0, 40), count=st.integers(0, 8)
)
def test_drafts_are_those_of_a_search(tokens, cut, count):
    index = NgramIndex(tokens[:cut])
    index.propose(3)  # a proposal changes nothing
    index.extend(tokens[cut:])
    match_length, drafts = search(tokens, count)
    assert index.match_length == match_length
    assert index.propose(count) == drafts


def test_drafts_follow_the_longest_match_and_repeat_a_loop():
    assert NgramIndex([7, 8, 9, 7, 8, 9, 7]).propose(5) == (8, 9, 7, 8, 9)
    assert NgramIndex([5, 6, 5]).propose(4) == ()  # a match has MIN_GRAM_TOKENS or more
