from __future__ import annotations

from pathlib import Path

import pytest

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.measuring.lossless import run_tokens
from same_text import assert_same_text

SAMPLING = [SamplingParams(), SamplingParams(0.8, seed=7), SamplingParams(1.0, 50, 0.8, seed=7)]
PLANS = [
    *((plan, lookahead) for plan in ("two-pass", "fused") for lookahead in (1, 2, 4)),
    ("fused:3,1,0,2", 4),
    ("auto", None),
]
"""Plans, and look-aheads."""


@pytest.fixture(scope="module")
def session(subset_bundle: Path) -> Session:
    return load(subset_bundle, "cpu", threads=1)


@pytest.fixture(scope="module")
def rejecting(rejection_bundle: Path) -> Session:
    return load(rejection_bundle, "cpu", threads=1)


def options(sampling: SamplingParams, plan: str, lookahead: int | None = None) -> GenerateOptions:
    return GenerateOptions(24, sampling, plan=plan, lookahead=lookahead, ignore_eos=True)


def check_plans(session: Session, sampling: SamplingParams) -> None:
    prompt = session.encode("The quick brown fox jumps over")
    plain = run_tokens(session, prompt, options(sampling, "ar")).token_ids
    for plan, lookahead in PLANS:
        assert_same_text(session, prompt, options(sampling, plan, lookahead), plain)


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sample", "truncated"])
def test_every_plan_is_plain_decoding(session: Session, sampling: SamplingParams):
    check_plans(session, sampling)


def test_greedy_text_with_the_rejection_rule_is_plain_decoding(rejecting: Session):
    check_plans(rejecting, SAMPLING[0])


@pytest.mark.parametrize("sampling", SAMPLING[1:], ids=["sample", "truncated"])
def test_sampled_text_with_the_rejection_rule_is_repeatable(
    rejecting: Session, sampling: SamplingParams
):
    prompt = rejecting.encode("The quick brown fox jumps over")
    for plan, lookahead in PLANS[:-1]:  # not `auto`, whose plans depend on the time
        request = options(sampling, plan, lookahead)
        tokens, again = (run_tokens(rejecting, prompt, request).token_ids for _ in range(2))
        assert len(tokens) == 24 and max(tokens) < 1024
        assert tokens == again
