from __future__ import annotations

import json

import numpy as np
import pytest
from reciting import engine_of
from test_logprobs import log_softmax

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load
from pass_runtime.bundle.window import ar_window
from pass_runtime.decode.engine import Engine

PROMPT = [2 + (i * 37 + i // 5) % 300 for i in range(150)]
SCORED = GenerateOptions(0, prompt_logprobs=3)
PLAIN = GenerateOptions(4, plan="ar", ignore_eos=True)
ROUNDING = 1e-4
"""float32 sums in another order than numpy's; the logits are up to 100."""


@pytest.fixture(scope="module")
def session(random_bundle):
    with load(random_bundle, "cpu", threads=1, max_batch_size=2) as session:
        yield session


@pytest.fixture(scope="module")
def expected(session: Session) -> list[np.ndarray]:
    """For every token of PROMPT but the first, log-probabilities [V] at its place: the log-softmax
    of the logits of a plain pass after the tokens before it."""
    rows = []
    for i in range(1, len(PROMPT)):
        session.generate_ids(PROMPT[:i], GenerateOptions(1, plan="ar", ignore_eos=True)).result()
        rows.append(log_softmax(session.backend.logits(ar_window())[0, 0]))
    return rows


def values(session: Session, prompt: list[int], options: GenerateOptions = SCORED) -> list[float]:
    first, *others = session.generate(prompt, options).result().prompt_logprobs
    assert first is None
    return [each.logprob for each in others]


@pytest.mark.parametrize("length", [1, 2, 3, 17, 66, 150])
def test_they_are_the_log_softmax_of_the_logits_of_plain_passes(session, expected, length):
    generation = session.generate(PROMPT[:length], SCORED).result()
    first, *others = generation.prompt_logprobs
    assert first is None and len(others) == length - 1
    first, *others_in_json = json.loads(json.dumps(generation.as_dict()))["prompt_logprobs"]
    assert first is None
    assert [each["token"] for each in others_in_json] == PROMPT[1:length]
    assert [each["logprob"] for each in others_in_json] == [each.logprob for each in others]
    for token, row, value in zip(PROMPT[1:length], expected, others, strict=False):
        assert value.logprob == pytest.approx(row[token], abs=ROUNDING)
        ids, tops = zip(*value.top, strict=True)
        assert tops == pytest.approx(np.sort(row)[::-1][:3], abs=ROUNDING)
        assert tops == pytest.approx(row[list(ids)], abs=ROUNDING)


@pytest.mark.parametrize("width", [1, 16, 64])
@pytest.mark.parametrize("count", [1, 7, 16, 50])
def test_the_size_of_the_pieces_changes_none(session, monkeypatch, width, count):
    if count > width:
        return
    whole = values(session, PROMPT)
    monkeypatch.setattr(
        Engine, "_chunk", lambda _, start, stop, *__, **___: (min(count, stop - start), width)
    )
    in_pieces = values(session, PROMPT)
    same = session.backend.capabilities.same_entries  # but for the rounding of the sum of V numbers
    assert in_pieces == pytest.approx(whole, abs=1e-5 if same else ROUNDING)


def test_wide_windows_are_not_used_for_them(session):
    chunk = engine_of(session)._chunk
    assert chunk(0, 1000, None, scored=False) == (256, 256)
    assert chunk(0, 1000, None, scored=True) == (64, 64)
    assert chunk(0, 1000, 16, scored=True) == (16, 16)


def test_no_cached_entries_stand_in_for_the_prompt(session):
    """Neither those of a slot nor saved ones; but others use what such a request has read."""
    fresh = values(session, PROMPT)
    other = [7, *PROMPT[1:]]
    for prompt in (PROMPT, other, PROMPT, PROMPT):  # `other` takes the slots
        session.generate(prompt, PLAIN).result()
    options = GenerateOptions(2, prompt_logprobs=0, reuse_prefix=True, ignore_eos=True)
    scored = session.generate(PROMPT, options).result()
    assert scored.stats.cached_tokens == 0
    assert [each.logprob for each in scored.prompt_logprobs[1:]] == fresh
    reusing = session.generate(PROMPT, PLAIN).result()
    if session.backend.capabilities.same_entries:
        assert reusing.stats.cached_tokens == 144
    assert reusing.token_ids[:2] == scored.token_ids


def test_they_change_no_token_and_others_get_none(session):
    """Requests with and without them, that wait, are read and decode beside each other."""
    prompts = [PROMPT[i : i + 70] for i in range(6)]
    sampling = SamplingParams(0.9, seed=3)
    options = GenerateOptions(30, sampling, ignore_eos=True)
    alone = [session.generate(each, options).result().token_ids for each in prompts]
    apart = [values(session, each) for each in prompts]
    requests = [
        options if i % 2 else options.with_fields(prompt_logprobs=1) for i in range(len(prompts))
    ]
    together = [session.generate(*each) for each in zip(prompts, requests, strict=True)]
    for i, generation in enumerate(together):
        assert generation.result().token_ids == alone[i]
        if i % 2:
            assert generation.prompt_logprobs is None
            assert "prompt_logprobs" not in generation.as_dict()
        else:
            got = [each.logprob for each in generation.prompt_logprobs[1:]]
            assert got == pytest.approx(apart[i], abs=ROUNDING)


def test_without_a_token_to_write_no_pass_runs(session):
    generation = session.generate(PROMPT, SCORED)
    assert list(generation) == []
    assert (generation.finish_reason, generation.text) == ("length", "")
    assert (generation.token_ids, generation.stats.passes) == ([], 0)
    for count in (0, 1):
        assert values(session, [5], GenerateOptions(count, prompt_logprobs=0)) == []
    with pytest.raises(PassError, match="max-new-tokens must be at least 1, not 0, without prompt"):
        GenerateOptions(0)
    with pytest.raises(PassError, match="max-new-tokens must be at least 1, not -1"):
        GenerateOptions(-1, prompt_logprobs=0)


def test_the_first_piece_finds_all_of_them(session):
    generation = session.generate(PROMPT, PLAIN.with_fields(prompt_logprobs=0))
    next(iter(generation))
    assert len(generation.prompt_logprobs) == len(PROMPT)


def test_they_are_the_models_own_also_where_the_texts_are_processed(random_bundle, expected):
    options = GenerateOptions(
        2, SamplingParams(logit_bias={5: 50.0}), prompt_logprobs=0, logprobs=0, ignore_eos=True
    )
    with load(random_bundle, "cpu", threads=1, logprobs_mode="processed") as session:
        result = session.generate(PROMPT, options).result()
    raw = [row[token] for row, token in zip(expected, PROMPT[1:], strict=True)]
    assert [each.logprob for each in result.prompt_logprobs[1:]] == pytest.approx(raw, abs=ROUNDING)
    assert result.token_ids == [5, 5] and result.tokens[0].logprobs.logprob > -0.1
