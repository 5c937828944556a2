from __future__ import annotations

import time

import pytest
from reciting import EOS, recited, reciting_session, right_unless, windows_run, words, wrong

from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session
from pass_runtime.text.detokenizer import TextStream

LENGTHS = range(1, 7)
TEMPERATURES = [0.0, 0.9]


def options(
    tokens: int, lookahead: int | None = None, temperature: float = 0.0, **others
) -> GenerateOptions:
    sampling = SamplingParams(temperature, seed=3)
    return GenerateOptions(tokens, sampling, plan="two-pass", lookahead=lookahead, **others)


def run(session: Session, prompt: list[int], request: GenerateOptions):
    stream = session.generate_ids(prompt, request)
    for tokens in stream:
        assert tokens
    return stream


@pytest.mark.parametrize(
    ("plan", "emitted"),
    [
        ("fused:2,1,0", [1, 3, 1, 3, 1, 3]),
        ("fused:2,2,1", [1, 3, 2, 3, 2, 3]),
        ("fused:4,3,2,2,1", [1, 5, 2, 4, 3, 3, 3]),
        ("fused:1,1", [1, 2, 2, 2]),
    ],
)
def test_a_pass_leaves_as_many_drafts_as_the_group_after_its_last_draft(tiny_bundle, plan, emitted):
    """A pass that emits n tokens accepts n - 1 drafts; the next one emits 1 + groups[n - 1]."""
    session = reciting_session(tiny_bundle)
    stream = session.generate_ids([5], GenerateOptions(sum(emitted), plan=plan))
    assert [len(tokens) for tokens in stream] == emitted
    assert stream.token_ids == recited(1, sum(emitted))
    assert stream.stats.drafted == stream.stats.accepted == sum(emitted) - len(emitted)


@pytest.mark.parametrize("plan", ["fused", "two-pass"])
@pytest.mark.parametrize("draft", ["ngram", "both"])
def test_repetitive_text_is_drafted_from_itself(tiny_bundle, plan, draft):
    def repeating(position: int) -> int:
        return 10 + position % 9

    session = reciting_session(tiny_bundle, target=repeating, drafter=wrong)
    stream = run(session, [9], GenerateOptions(200, plan=plan, draft=draft))
    assert stream.token_ids == [repeating(position) for position in range(1, 201)]
    prompt, request = [*map(repeating, range(60))], GenerateOptions(70, plan=plan, draft=draft)
    assert [len(tokens) for tokens in session.generate_ids(prompt, request)] == [17, 17, 17, 17, 2]


@pytest.mark.parametrize(
    ("lookahead", "misses", "accepted"),
    [
        # From a root at r the drafts are for r+2 ... r+1+L, and the next root is r+2+accepted.
        (3, lambda p: p % 7 == 0, [3, 0] * 4),  # r = 0, 5, 7, 12, 14, ...
        (4, lambda p: p % 5 == 4, [2, 3, 3, 3, 3]),  # r = 0, 4, 9, 14, ...
        (6, lambda p: p % 4 == 0, [2] * 6),  # r = 0, 4, 8, ...
        # right at every third position only: r = 0, 2, 4, 7, 10, ...
        (2, lambda p: p % 3 != 0, [0, 0, 1, 1, 1]),
        (5, lambda p: p == 9, [5, 0, 5, 5]),  # r = 0, 7, 9, 16
        *((lookahead, lambda p: False, [lookahead] * 5) for lookahead in LENGTHS),
        *((lookahead, lambda p: True, [0] * 10) for lookahead in LENGTHS),
    ],
)
def test_figures_if_drafts_are_right_at_some_positions(tiny_bundle, lookahead, misses, accepted):
    session = reciting_session(tiny_bundle, drafter=right_unless(misses))
    emitted = sum(count + 2 for count in accepted)
    stream = run(session, [5], options(emitted, lookahead))
    stats = stream.stats
    assert stream.token_ids == recited(1, emitted)
    assert stats.passes == 2 * len(accepted)
    assert stats.tau == pytest.approx(emitted / (2 * len(accepted)))
    assert stats.acceptance_histogram == [accepted.count(i) for i in range(lookahead + 1)]
    rates = [sum(count > i for count in accepted) / len(accepted) for i in range(lookahead)]
    assert stats.acceptance_per_position == pytest.approx(rates)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("end", [1, 2, 4, 7, 8, 9])
def test_end_of_sequence_drops_what_follows_it_in_its_window(tiny_bundle, end, temperature):
    session = reciting_session(
        tiny_bundle, lambda position: EOS if position == end else words(position)
    )
    stream = run(session, [5], options(30, 6, temperature))
    assert stream.token_ids == [*recited(1, end - 1), EOS]
    assert (stream.finish_reason, stream.stop_reason) == ("stop", EOS)
    assert stream.stats.generated_tokens == end
    ignoring = run(session, [5], options(30, 6, temperature, ignore_eos=True))
    assert ignoring.token_ids == [*recited(1, end - 1), EOS, *recited(end + 1, 30 - end)]
    assert (ignoring.finish_reason, ignoring.stop_reason) == ("length", None)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_max_new_tokens_drops_what_follows_in_the_window_an_end_too(tiny_bundle, tokens):
    session = reciting_session(
        tiny_bundle, lambda position: EOS if position == 5 else words(position)
    )
    stream = run(session, [5, 6], options(tokens, 6))
    assert stream.token_ids == [*recited(2, 3), EOS][:tokens]
    reasons = ("stop", EOS) if tokens >= 4 else ("length", None)
    assert (stream.finish_reason, stream.stop_reason) == reasons
    stream = run(reciting_session(tiny_bundle), [5, 6], options(tokens, 6))
    assert stream.token_ids == recited(2, tokens)
    assert (stream.finish_reason, stream.stop_reason) == ("length", None)


@pytest.mark.parametrize(
    ("lookahead", "plans", "sizes"),
    [(6, ["draft-6", "verify-6"] * 2, [1, 7, 1, 7]), (0, ["ar"] * 6, [1] * 6)],
)
def test_each_pass_writes_a_piece_and_lookahead_0_is_plain(tiny_bundle, lookahead, plans, sizes):
    session = reciting_session(tiny_bundle)
    names = windows_run(session)
    stream = session.generate_ids([5], options(sum(sizes), lookahead))
    assert [len(piece) for piece in stream] == sizes
    assert names == plans
    assert stream.stats.plan == ("two-pass" if lookahead else "ar")


@pytest.mark.parametrize("lookahead", [-1, 7])
def test_lookahead_beyond_the_bundle_is_refused(tiny_bundle, lookahead):
    with pytest.raises(
        PassError, match=f"look-ahead must be 0 to 6, the look-ahead of the bundle, not {lookahead}"
    ):
        reciting_session(tiny_bundle).generate_ids([5], options(6, lookahead))


def test_every_request_begins_with_a_draft_pass(tiny_bundle):
    session = reciting_session(tiny_bundle)
    first, _, third = (
        run(session, [7, 8, 9], options(tokens, 2)).stats.as_dict() for tokens in (8, 1, 8)
    )
    assert first["passes"] == third["passes"] == 4
    assert first["acceptance_histogram"] == third["acceptance_histogram"] == [0, 0, 2]


def test_decoding_time_is_split_between_engine_and_host(tiny_bundle, monkeypatch):
    session = reciting_session(tiny_bundle, slots=2)
    monkeypatch.setattr(session.backend, "run", _delayed(0.004, session.backend.run))
    monkeypatch.setattr(session.backend, "prefill", _delayed(0.050, session.backend.prefill))
    monkeypatch.setattr(TextStream, "read", _delayed(0.002, TextStream.read))
    request = options(50, 0)
    short, long = session.generate([7], request), session.generate([7] * 200, request)
    short_stats, long_stats = short.result().stats, long.result().stats
    assert short_stats.passes == long_stats.passes == 50
    assert short_stats.engine_seconds >= 50 * 0.004 + 3 * 0.050  # the long prompt has 3 chunks
    assert short_stats.host_seconds >= 50 * 0.002
    assert 50 * 0.004 <= long_stats.engine_seconds <= long_stats.decode_seconds - 50 * 0.002


def _delayed(seconds: float, call):
    return lambda *arguments: time.sleep(seconds) or call(*arguments)
