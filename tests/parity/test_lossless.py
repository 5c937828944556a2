from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.measuring.lossless import run_tokens
from same_text import assert_plans_write_plain_text, assert_same_text

SAMPLING = [
    (0.0, 0, 1.0),
    (0.7, 0, 1.0),
    (1.0, 0, 1.0),
    (0.7, 40, 1.0),
    (1.0, 0, 0.9),
    (1.0, 50, 0.8),
]
"""Temperature, top-k and top-p."""
SEEDS = (0, 7, 2**63 + 1)
PROMPTS = {
    "one token": "a",
    "text": "The quick brown fox jumps over",
    "code": "def add(a, b):\n    return",
    "bytes": "Über 12345 naïve 🦊",
    "long": "The quick brown fox jumps over the lazy dog. def add(a, b): " * 15,
}
TOKENS = 32
BUNDLES = ("tiny_bundle", "random_bundle", "adapter_bundle", "head_bundle", "subset_bundle")
CASES = [
    pytest.param(
        bundle,
        prompt,
        values,
        marks=[pytest.mark.seldom] * ((i + j + k) % len(BUNDLES) > 0),
        id=f"{bundle}-{prompt}-{values}",
    )
    for i, bundle in enumerate(BUNDLES)
    for j, prompt in enumerate(PROMPTS)
    for k, values in enumerate(SAMPLING)
]
"""Every prompt with every sampling, each pair with one of the bundles, or with all (--all)."""
for_all_cases = pytest.mark.parametrize(("bundle", "prompt", "values"), CASES, indirect=["bundle"])


@pytest.fixture(scope="module", params=BUNDLES)
def bundle(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def session(bundle: Path) -> Session:
    return load(bundle, "cpu", threads=1)


def options(
    sampling: SamplingParams, plan: str, lookahead: int | None = None, **fields
) -> GenerateOptions:
    fields = {"max_new_tokens": TOKENS, "ignore_eos": True} | fields
    return GenerateOptions(sampling=sampling, plan=plan, lookahead=lookahead, **fields)


def test_the_long_prompt_spans_prefill_chunks(session: Session):
    assert len(session.encode(PROMPTS["long"])) > 300
    assert len(session.encode(PROMPTS["one token"])) == 1


@for_all_cases
def test_two_pass_is_plain_decoding(
    session: Session, prompt: str, values: tuple[float, int, float]
):
    ids = session.encode(PROMPTS[prompt])
    for seed in SEEDS[:1] if values[0] == 0 or prompt == "long" else SEEDS[1:]:
        sampling = SamplingParams(*values, seed)
        lookaheads = range(1, min(6, session.manifest.lookahead.length) + 1)
        plans = [("two-pass", lookahead) for lookahead in lookaheads]
        assert_plans_write_plain_text(session, ids, options(sampling, "ar"), plans)


@for_all_cases
def test_fused_is_plain_decoding(session: Session, prompt: str, values: tuple[float, int, float]):
    ids = session.encode(PROMPTS[prompt])
    sampling = SamplingParams(*values, SEEDS[len(prompt) % 3])
    plain = run_tokens(session, ids, options(sampling, "ar")).token_ids
    for lookahead in range(1, session.manifest.lookahead.length + 1):
        assert_same_text(session, ids, options(sampling, "fused", lookahead), plain)
    drafts = (("fused", "both"), ("fused", "ngram"), ("two-pass", "both"), ("auto", None))
    for plan, draft in drafts:
        assert_same_text(session, ids, options(sampling, plan, draft=draft), plain)


@settings(derandomize=True, deadline=None, max_examples=15)
@given(data=st.data())
def test_every_group_shape_is_plain_decoding(session: Session, data: st.DataObject):
    drafts = data.draw(st.integers(1, session.manifest.lookahead.length))
    sizes = [
        data.draw(st.integers(1, drafts)),
        *data.draw(st.lists(st.integers(0, drafts), min_size=drafts, max_size=drafts)),
    ]
    sampling = SamplingParams(
        *data.draw(st.sampled_from(SAMPLING)), data.draw(st.integers(0, 2**64 - 1))
    )
    ids = session.encode(PROMPTS[data.draw(st.sampled_from(["text", "code"]))])
    plain = run_tokens(session, ids, options(sampling, "ar")).token_ids
    shape = f"fused:{','.join(map(str, sizes))}"
    draft = data.draw(st.sampled_from(["lookahead", "both"]))
    assert_same_text(session, ids, options(sampling, shape, draft=draft), plain)


@pytest.mark.parametrize("values", [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 50, 0.8)], ids=str)
def test_the_seed_alone_decides_a_sampled_text(session: Session, values: tuple[float, int, float]):
    prompt = session.encode(PROMPTS["text"])
    requests = [options(SamplingParams(*values, seed), "two-pass") for seed in range(6)]
    texts, again = (
        [tuple(run_tokens(session, prompt, request).token_ids) for request in requests]
        for _ in range(2)
    )
    assert texts == again and len(set(texts)) == (6 if values[0] else 1)


REJECTING_PLANS = [
    *((plan, lookahead) for plan in ("two-pass", "fused") for lookahead in (1, 2, 4)),
    ("fused:3,1,0,2", 4),
]


def test_greedy_text_with_the_rejection_rule_is_plain_decoding(rejection_bundle: Path):
    with load(rejection_bundle, "cpu", threads=1) as session:
        ids = session.encode(PROMPTS["text"])
        plain, plans = options(SamplingParams(), "ar"), [*REJECTING_PLANS, ("auto", None)]
        assert_plans_write_plain_text(session, ids, plain, plans)


@pytest.mark.parametrize("values", [(0.8, 0, 1.0), (1.0, 50, 0.8)], ids=["sample", "truncated"])
def test_sampled_text_with_the_rejection_rule_is_repeatable(
    rejection_bundle: Path, values: tuple[float, int, float]
):
    with load(rejection_bundle, "cpu", threads=1) as session:
        ids = session.encode(PROMPTS["text"])
        for plan in REJECTING_PLANS:  # not `auto`, whose plans depend on the time
            request = options(SamplingParams(*values, 7), *plan)
            tokens, again = (run_tokens(session, ids, request).token_ids for _ in range(2))
            assert len(tokens) == TOKENS and max(tokens) < 1024
            assert tokens == again
