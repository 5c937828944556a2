from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.bundle.window import ar_window

SAMPLING = [SamplingParams(), SamplingParams(1.0, seed=5), SamplingParams(0.8, 30, 0.9, seed=6)]
PLANS = [
    ("ar", None),
    ("two-pass", None),
    ("fused", "both"),
    ("fused:3,1,0,2", None),
    ("two-pass", "ngram"),
    ("auto", None),
]
PROMPT = [5, 6, 7, 8, 5, 6]
ROUNDING = 2e-3
"""How much a log-probability may differ: plans compute a row beside different numbers of others."""


@pytest.fixture(scope="module")
def session(random_bundle) -> Session:
    return load(random_bundle, "cpu", threads=1, max_batch_size=2)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    behind = logits.astype(np.float64) - logits.max()
    return behind - np.log(np.exp(behind).sum())


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sample", "truncated"])
def test_logprobs_are_the_log_softmax_of_the_logits_for_every_plan(
    session: Session, sampling: SamplingParams
):
    fields = {"sampling": sampling, "logprobs": 5, "ignore_eos": True}
    streams = [
        session.generate_ids(PROMPT, GenerateOptions(24, plan=plan, draft=draft, **fields)).result()
        for plan, draft in PLANS
    ]
    written = streams[0].token_ids
    assert all(stream.token_ids == written for stream in streams), "a near-tie: choose another seed"
    options = GenerateOptions(1, plan="ar", ignore_eos=True)
    for i, token in enumerate(written):
        session.generate_ids([*PROMPT, *written[:i]], options).result()
        expected = log_softmax(session.backend.logits(ar_window())[0, 0])
        best = np.sort(expected)[::-1][:5]
        for stream in streams:
            logprobs = stream.tokens[i].logprobs
            assert logprobs is not None and len(logprobs.top) == 5
            assert logprobs.logprob == pytest.approx(expected[token], abs=ROUNDING)
            ids, values = zip(*logprobs.top, strict=True)
            assert values == pytest.approx(best, abs=ROUNDING)
            assert values == pytest.approx(expected[list(ids)], abs=ROUNDING)


def test_only_a_request_that_asks_gets_logprobs(session: Session):
    options = GenerateOptions(30, plan="two-pass", ignore_eos=True)
    streams = [
        session.generate_ids(PROMPT, replace(options, logprobs=count)) for count in (0, None)
    ]
    asking, silent = (stream.result() for stream in streams)
    assert asking.token_ids == silent.token_ids
    assert all(token.logprobs is not None and token.logprobs.top == () for token in asking.tokens)
    assert all(token.logprobs is None for token in silent.tokens)
    assert len(asking.as_dict()["logprobs"]) == 30
    assert "logprobs" not in silent.as_dict()


def test_each_token_names_its_source(session: Session):
    """An accepted draft names its source, every other token the model."""
    options = GenerateOptions(60, plan="two-pass", draft="both", ignore_eos=True)
    stream = session.generate_ids([10, 11, 12] * 6, options).result()
    sources = [token.source for token in stream.tokens]
    assert sources.count("model") == stream.stats.passes
    assert len(sources) - sources.count("model") == stream.stats.accepted
