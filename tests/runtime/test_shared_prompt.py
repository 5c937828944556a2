from __future__ import annotations

from dataclasses import replace

import pytest
from reciting import ENDLESS, assert_idle, engine_of

from pass_runtime import GenerateOptions, SamplingParams
from pass_runtime.measuring.lossless import first_difference
from pass_runtime.session import load

PROMPT = list(range(20, 130))  # more than a chunk


def options_of(texts: int, plan: str = "two-pass") -> list[GenerateOptions]:
    samplings = (SamplingParams(0.9, seed=7 + i) for i in range(texts))
    return [GenerateOptions(12, sampling, plan=plan, ignore_eos=True) for sampling in samplings]


@pytest.fixture(scope="module")
def expected(tiny_bundle):
    with load(tiny_bundle, "cpu", threads=1) as session:
        return [session.generate(PROMPT, options).result().token_ids for options in options_of(5)]


def watched_session(bundle, slots: int):
    session = load(bundle, "cpu", threads=1, max_batch_size=slots)
    chunk_lengths, prefill = [], session.backend.prefill

    def recorded(slot, length, tokens, *more):
        chunk_lengths.append(len(tokens))
        return prefill(slot, length, tokens, *more)

    session.backend.prefill = recorded  # type: ignore[method-assign]
    return session, chunk_lengths


@pytest.mark.parametrize(
    ("slots", "plan"), [(1, "two-pass"), (2, "ar"), (4, "fused"), (8, "two-pass")]
)
def test_one_prompt_is_read_once(tiny_bundle, expected, slots, plan):
    """Also with fewer slots than texts: later ones copy the prompt from a slot, free or in use."""
    session, chunk_lengths = watched_session(tiny_bundle, slots)
    with session:
        streams = [each.result() for each in session.generate_all(PROMPT, options_of(5, plan))]
        assert [stream.token_ids for stream in streams] == expected
        # All of the prompt but the root.
        assert sum(chunk_lengths) == len(PROMPT) - 1
        cached_tokens = sorted(stream.stats.cached_tokens for stream in streams)
        assert cached_tokens == [0] + [len(PROMPT) - 1] * 4
        assert_idle(session)


def test_a_shared_prompt_is_read_while_others_decode(tiny_bundle, expected):
    session, chunk_lengths = watched_session(tiny_bundle, 4)
    with session:
        running = session.generate([5, 6, 7], ENDLESS)
        next(running)
        first = session.generate_all(PROMPT, options_of(2))
        single = session.generate(PROMPT, options_of(1)[0])
        second = session.generate_all(PROMPT[:-1], options_of(2))
        assert [stream.result().token_ids for stream in first] == expected[:2]
        assert single.result().token_ids == expected[0]
        assert len({tuple(stream.result().token_ids) for stream in second}) == 2
        assert not running.done, "the tiny model has become quicker than this test"
        running.cancel()
        # Without their roots, the prompts have 2, 109, 109 and 108 tokens. The last two find six
        # blocks of 16 tokens in the prefix cache.
        assert sum(chunk_lengths) == 2 + 109 + (109 - 96) + (108 - 96)


@pytest.mark.parametrize("chunk", [1, 2])
def test_if_the_request_that_reads_the_prompt_is_cancelled_the_next_reads_on(
    tiny_bundle, expected, chunk
):
    session, chunk_lengths = watched_session(tiny_bundle, 3)
    with session:
        running = session.generate([3, 4], ENDLESS)  # so that the prompt is read in chunks
        next(running)
        prefill, slots = session.backend.prefill, []

        def cancel_and_prefill(slot, *arguments):
            slots.append(slot)
            if len(slots) == chunk:
                engine_of(session).slots[slot].sequence.cancelled = True
            prefill(slot, *arguments)

        session.backend.prefill = cancel_and_prefill  # type: ignore[method-assign]
        first, *others = session.generate_all(PROMPT, options_of(3))
        assert [stream.result().token_ids for stream in others] == expected[1:3]
        assert first.result().finish_reason == "cancelled"
        assert len(PROMPT) - 1 < sum(chunk_lengths) < 2 * (len(PROMPT) - 1)
        running.cancel()


def test_a_failed_read_of_the_prompt_fails_its_request_only(tiny_bundle, expected):
    session, _ = watched_session(tiny_bundle, 3)
    with session:
        prefill, failures = session.backend.prefill, [RuntimeError("broken")]

        def fail_once(*arguments):
            if failures:
                raise failures.pop()
            prefill(*arguments)

        session.backend.prefill = fail_once  # type: ignore[method-assign]
        first, *others = session.generate_all(PROMPT, options_of(3))
        with pytest.raises(RuntimeError, match="broken"):
            first.result()
        assert [stream.result().token_ids for stream in others] == expected[1:3]


@pytest.fixture(scope="module")
def without_cache(tiny_bundle):
    with load(tiny_bundle, "cpu", threads=1, prefix_cache=False) as session:
        yield session


def test_the_block_that_ends_with_the_root_is_not_reused(without_cache):
    """The root, the last token of the prompt, must run to predict the next token."""
    prompt = list(range(20, 68))
    options = GenerateOptions(5, plan="ar", reuse_prefix=True, ignore_eos=True)
    streams = [without_cache.generate_ids(prompt, options).result() for _ in range(2)]
    assert [stream.stats.cached_tokens for stream in streams] == [0, 32]
    assert streams[0].token_ids == streams[1].token_ids


def test_entries_of_rejected_drafts_and_lookahead_rows_are_not_reused(without_cache):
    """After a request that ended early, and with another plan."""
    prompt = list(range(120, 160))
    running = without_cache.generate_ids(prompt, ENDLESS)
    next(running)
    next(running)
    running.cancel()
    assert running.result().finish_reason == "cancelled"
    prompt = [*prompt[:35], 200, 201]
    options = GenerateOptions(15, plan="ar", ignore_eos=True, reuse_prefix=True)
    reused = without_cache.generate_ids(prompt, options).result()
    fresh = without_cache.generate_ids(prompt, replace(options, reuse_prefix=False)).result()
    assert (reused.stats.cached_tokens, fresh.stats.cached_tokens) == (32, 0)
    written = (reused.token_ids, fresh.token_ids)
    difference = first_difference(without_cache, prompt, options, *written)
    assert difference is None or difference.is_near_tie, difference
