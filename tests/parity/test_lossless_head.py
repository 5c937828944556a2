"""Whatever a draft head does, the text is plain decoding's: with candidates that are a part of the
vocabulary, and by either rule. (`test_lossless` has a head that sees all of a small one.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import export_bundle
from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.measuring.lossless import first_difference, run_tokens

SAMPLING = [SamplingParams(), SamplingParams(0.8, seed=7), SamplingParams(1.0, 50, 0.8, seed=7)]
PLANS = [
    *((mode, n) for mode in ("two-pass", "fused") for n in (1, 2, 4)),
    ("fused:3,1,0,2", 4),
    ("auto", None),
]


@pytest.fixture(scope="module")
def session(subset_bundle: Path) -> Session:
    return load(subset_bundle, "cpu", threads=1)


@pytest.fixture(scope="module")
def by_rejection(subset_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    source, output = subset_bundle.parent, tmp_path_factory.mktemp("rejection") / "bundle"
    weights = source / "lookahead.safetensors"
    export_bundle(
        source / "model", output, lookahead=4, lookahead_weights=weights, rule="rejection"
    )
    return load(output, "cpu", threads=1)


def options(sampling: SamplingParams, plan: str, lookahead: int | None = None) -> GenerateOptions:
    return GenerateOptions(24, sampling, plan=plan, lookahead=lookahead, ignore_eos=True)


def check(session: Session, sampling: SamplingParams) -> None:
    prompt = session.encode("The quick brown fox jumps over")
    plain = run_tokens(session, prompt, options(sampling, "ar")).token_ids
    for plan, lookahead in PLANS:
        fast = options(sampling, plan, lookahead)
        difference = first_difference(
            session, prompt, fast, plain, run_tokens(session, prompt, fast).token_ids
        )
        assert difference is None or difference.is_near_tie, (plan, lookahead, str(difference))


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "sample", "truncated"])
def test_every_plan_is_plain_decoding(session: Session, sampling: SamplingParams):
    check(session, sampling)


def test_by_rejection_greedy_text_is_plain_decoding(by_rejection: Session):
    check(by_rejection, SAMPLING[0])


@pytest.mark.parametrize("sampling", SAMPLING[1:], ids=["sample", "truncated"])
def test_by_rejection_every_plan_draws_tokens(by_rejection: Session, sampling: SamplingParams):
    """Their distribution is tested on the tails; here their q goes from pass to pass."""
    prompt = by_rejection.encode("The quick brown fox jumps over")
    for plan, lookahead in PLANS[:-1]:
        asked = options(sampling, plan, lookahead)
        tokens, again = (run_tokens(by_rejection, prompt, asked).token_ids for _ in range(2))
        assert len(tokens) == 24 and max(tokens) < 1024
        assert tokens == again
