from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reciting import reciting_session, tokens_of, windows_run, words, wrong

from pass_runtime import GenerateOptions
from pass_runtime.decode.copies import MAX_MATCH_TOKENS, MAX_MATCHES, CopyIndex


def match_length(tokens: list[int], end: int) -> int:
    lengths = range(1, min(end, MAX_MATCH_TOKENS) + 1)
    return max((n for n in lengths if tokens[end - n : end] == tokens[-n:]), default=0)


def search(tokens: list[int], count: int) -> tuple[tuple[int, ...], bool]:
    """Return what follows the newest of the longest matches that agree with the vote, and whether
    the matches agree."""
    ends = [end for end in range(len(tokens) - 1, 0, -1) if match_length(tokens, end) > 1]
    if not ends or count == 0:
        return (), False
    votes = Counter[int]()
    for end in ends:
        votes[tokens[end]] += match_length(tokens, end) ** 2
    chosen = votes.most_common(1)[0][0]
    _, source = max((match_length(tokens, e), e) for e in ends if tokens[e] == chosen)
    text = list(tokens)
    for i in range(count):
        text.append(text[source + i])
    return tuple(text[len(tokens) :]), len(votes) == 1


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    tokens=st.lists(st.integers(0, 5), max_size=60), cut=st.integers(0, 60), count=st.integers(0, 8)
)
def test_drafts_are_those_of_a_search(tokens, cut, count):
    pairs = Counter(pairwise(tokens))
    if pairs and max(pairs.values()) > MAX_MATCHES:
        return  # only the newest vote
    index = CopyIndex(tokens[:cut])
    index.propose(3)  # a proposal changes nothing
    index.extend(tokens[cut:])
    drafts = index.propose(count)
    expected, agreed = search(tokens, count)
    assert (() if drafts is None else drafts.tokens) == expected
    if agreed:
        assert drafts.confidence > 0


@pytest.mark.parametrize(
    ("tokens", "confidence"),
    [
        ([1, 2, 9, 1, 2], 1),
        ([1, 2, 3, 9, 1, 2, 3], 2),
        ([*range(4), 9, *range(4)], 3),
        ([*range(8), 9, *range(8)], 4),
        ([*range(16), 99, *range(16)], 5),
        ([1, 2, 9, 1, 2, 9, 5, 1, 2], 3),  # two matches agree
        ([1, 2, 9, 1, 2, 8, 5, 1, 2], 0),  # they do not
    ],
)
def test_long_and_unanimous_matches_are_surer(tokens, confidence):
    assert CopyIndex(tokens).propose(4).confidence == confidence


def test_drafts_repeat_a_loop_and_need_two_matching_tokens():
    assert CopyIndex([7, 8, 9, 7, 8, 9, 7]).propose(5).tokens == (8, 9, 7, 8, 9)
    assert CopyIndex([5, 6, 5]).propose(4) is None


def test_a_copy_goes_on_beyond_newer_occurrences_of_its_last_tokens():
    source = [*range(10, 30), 1, 2, *range(30, 50)]
    index = CopyIndex([*source, *[1, 2, 3] * MAX_MATCHES, 0])
    for token in source[:22]:
        index.extend([token])
        index.propose(4)
    assert index.propose(4).tokens == tuple(source[22:26])


def test_a_repeated_text_is_verified_in_the_longest_window(tiny_bundle):
    session = reciting_session(tiny_bundle, lambda position: words(position % 40), wrong)
    names = windows_run(session)
    options = GenerateOptions(160, plan="fused", draft="both", ignore_eos=True)
    assert tokens_of(session, [words(0)], options) == [words(i % 40) for i in range(1, 161)]
    assert {"copy-8", "copy-16"} < set(names)
    assert len(names) < 60  # 40 tokens are new


def test_a_limit_of_drafts_holds_for_copies(tiny_bundle):
    session = reciting_session(tiny_bundle, lambda position: words(position % 40), wrong)
    names = windows_run(session)
    options = GenerateOptions(160, plan="fused", lookahead=2, draft="both", ignore_eos=True)
    assert len(tokens_of(session, [words(0)], options)) == 160
    assert {*names} == {"fused-2"}
