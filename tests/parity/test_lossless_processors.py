from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime import Constraint, GenerateOptions, SamplingParams, Session, load
from pass_runtime.measuring.lossless import run_tokens

PLANS = [
    ("two-pass", None),
    ("fused", None),
    ("fused", "both"),
    ("fused:3,1,0,2", None),
    ("two-pass", "ngram"),
]
"""Plans, and where drafts come from."""
CONSTRAINTS = [
    None,
    Constraint(regex="(ab|cd|[0-9]{2,5}){1,30}"),
    Constraint(choice=["the quick brown fox", "the lazy dog", "def add(a, b):"]),
    Constraint(
        json_schema={
            "type": "object",
            "properties": {"a": {"type": "integer"}, "list": {"type": "array"}},
        }
    ),
    Constraint(json_object=True),
    Constraint(grammar='start: "begin " word+ "end"\nword: /[a-z]{1,4}/ " "'),
]
PROMPTS = ["a", "The quick brown fox jumps over", "def add(a, b):\n    return"]


@pytest.fixture(scope="module", params=["random_bundle", "adapter_bundle", "head_bundle"])
def session(request: pytest.FixtureRequest) -> Session:
    return load(request.getfixturevalue(request.param), "cpu", threads=1, max_batch_size=2)


@st.composite
def requests(draw: st.DrawFn) -> dict:
    constraint = draw(st.sampled_from(CONSTRAINTS))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.8, 1.5])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        seed=draw(st.integers(0, 2**64 - 1)),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=draw(
            st.dictionaries(st.integers(0, 200), st.floats(-8, 8, width=16), max_size=20)
        ),
    )
    return {
        "sampling": sampling,
        "constraint": constraint,
        "max_new_tokens": draw(st.integers(1, 40)),
        "min_tokens": 1 if draw(st.booleans()) else 0,
        "bad_words": draw(
            st.sampled_from([(), ("the",), ("a", "in", "qu"), ("e", " f", "\n", "(ab", "0")])
        ),
        "ignore_eos": constraint is None and draw(st.booleans()),
        "allowed_token_ids": range(100) if constraint is None and draw(st.booleans()) else (),
    }


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=40)
@given(request=requests(), prompt=st.sampled_from(PROMPTS), data=st.data())
def test_every_plan_writes_what_plain_decoding_writes(
    session: Session, request: dict, prompt: str, data
):
    ids = session.encode(prompt)
    plain = run_tokens(session, ids, GenerateOptions(plan="ar", **request))
    plan, draft = data.draw(st.sampled_from(PLANS))
    drafted = run_tokens(session, ids, GenerateOptions(plan=plan, draft=draft, **request))
    assert drafted.token_ids == plain.token_ids
    assert drafted.finish_reason == plain.finish_reason
    check_text(session, request, plain.token_ids, plain.finish_reason)


def check_text(session: Session, request: dict, tokens: list[int], reason: str) -> None:
    """Assert that the text follows the constraint, the bad words and the allowed tokens."""
    ends = session.manifest.model.eos_token_ids
    text = session.tokenizer.decode([token for token in tokens if token not in ends])
    if request["allowed_token_ids"]:
        assert set(tokens) <= set(request["allowed_token_ids"])
    if request["constraint"] is None:
        assert not any(word in text for word in request["bad_words"])
    constraint = request["constraint"]
    if constraint is not None and constraint.kind.startswith("json") and reason == "stop":
        assert isinstance(json.loads(text), dict)
    if constraint is not None and constraint.choice:
        assert any(choice.startswith(text) for choice in constraint.choice)
        assert reason != "stop" or text in constraint.choice


def test_a_token_that_a_grammar_forces_is_a_draft(session: Session):
    constraint = Constraint(choice=["the quick brown fox jumps over the lazy dog"])
    results = {
        plan: session.generate("a", GenerateOptions(60, plan=plan, constraint=constraint)).result()
        for plan in ("ar", "fused", "two-pass")
    }
    assert results["ar"].text == constraint.choice[0]
    for plan in ("fused", "two-pass"):
        assert results[plan].text == results["ar"].text
        assert 2 * results[plan].stats.passes <= results["ar"].stats.passes
        assert "grammar" in {token.source for token in results[plan].tokens}


def test_penalties_count_the_newest_token_if_drafts_are_turned_off(random_bundle: Path):
    options = GenerateOptions(60, SamplingParams(frequency_penalty=1.5), ignore_eos=True)
    with load(random_bundle, "cpu", threads=1) as session:
        expected = session.generate("a", replace(options, plan="ar")).result().token_ids
    with load(random_bundle, "cpu", threads=1, speculative_max_concurrency=0) as session:
        assert session.generate("a", options).result().token_ids == expected
    assert len(set(expected)) > 20


@pytest.mark.parametrize("plan", ["ar", "two-pass", "fused"])
def test_the_rejection_rule_draws_allowed_tokens_as_often_as_plain_decoding(
    rejection_bundle: Path, plan: str
):
    """30 texts of 40 tokens are drawn from two letters, with every plan and by plain decoding."""
    with load(rejection_bundle, "cpu", threads=1, max_batch_size=4) as session:
        letters = [session.tokenizer.token_to_id(letter) for letter in ("a", "b")]
        assert None not in letters
        bias = dict.fromkeys(letters, 60.0)
        fixed = {"ignore_eos": True, "allowed_token_ids": letters}
        options = [
            GenerateOptions(40, SamplingParams(1.0, seed=seed, logit_bias=bias), plan=plan, **fixed)
            for seed in range(30)
        ]
        plain = token_counts(session, [replace(each, plan="ar") for each in options])
        counts = token_counts(session, options)
    assert set(counts) <= set(letters)
    share, plain_share = (each[letters[0]] / each.total() for each in (counts, plain))
    # 3.4 standard deviations of the difference between two shares of 1200 draws.
    assert abs(share - plain_share) < 0.07


def token_counts(session: Session, options: list[GenerateOptions]) -> Counter[int]:
    streams = [session.generate("a b", each) for each in options]
    return Counter(token for stream in streams for token in stream.result().token_ids)
