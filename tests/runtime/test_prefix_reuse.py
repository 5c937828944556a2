from __future__ import annotations

from dataclasses import replace

import pytest
from reciting import tokens_of

from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.measuring.lossless import first_difference
from pass_runtime.session import GenerateOptions, load


@pytest.fixture(scope="module")
def session(tiny_bundle):
    return load(tiny_bundle, "cpu", threads=1, prefix_cache=False)


def check_reuse(session, prompt: list[int], options: GenerateOptions, cached: int) -> None:
    reused = session.generate_ids(prompt, replace(options, reuse_prefix=True)).result()
    fresh = session.generate_ids(prompt, options).result()
    assert (reused.stats.cached_tokens, fresh.stats.cached_tokens) == (cached, 0)
    difference = first_difference(session, prompt, options, reused.token_ids, fresh.token_ids)
    assert difference is None or difference.is_near_tie, difference


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("plan", ["ar", "two-pass"])
@pytest.mark.parametrize("kept", [0, 1, 7, 19])
def test_prefix_reuse_changes_no_token(session, plan, temperature, kept):
    prompt = list(range(20, 60))
    options = GenerateOptions(20, SamplingParams(temperature, seed=9), plan=plan, ignore_eos=True)
    answer = tokens_of(session, prompt, options)
    other = next(token for token in (100, 101) if token != answer[kept])
    turn = [*prompt, *answer[:kept], other, 102, 103]
    check_reuse(session, turn, options, cached=(len(prompt) + kept) // 16 * 16)


def test_the_block_that_ends_with_the_root_is_not_reused(session):
    """The root, the last token of the prompt, must run to predict the next token."""
    prompt = list(range(20, 68))
    options = GenerateOptions(5, plan="ar", reuse_prefix=True, ignore_eos=True)
    tokens_of(session, [2], GenerateOptions(1))  # overwrites the prompts of other tests
    streams = [session.generate_ids(prompt, options).result() for _ in range(2)]
    assert [stream.stats.cached_tokens for stream in streams] == [0, 32]
    assert streams[0].token_ids == streams[1].token_ids


def test_prefix_reuse_after_an_early_end_and_with_another_plan(session):
    """K/V of rejected drafts and look-ahead rows must not be reused."""
    prompt = list(range(20, 60))
    running = session.generate_ids(prompt, GenerateOptions(700, plan="two-pass", ignore_eos=True))
    next(running)
    next(running)
    running.cancel()
    assert running.result().finish_reason == "cancelled"
    options = GenerateOptions(15, plan="ar", ignore_eos=True)
    check_reuse(session, [*prompt[:35], 200, 201], options, cached=32)
