from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chi2_contingency, chisquare, norm
from tail_oracle import exact_probabilities

from pass_runtime.bundle.reference import sample
from pass_runtime.bundle.sampling import SamplingParams

POSITIONS = 400_000
CHUNK = 20_000
SOUND, BIASED = 1e-3, 1e-6

Draw = Callable[[np.ndarray, np.ndarray, SamplingParams], np.ndarray]
"""[N,V] logits, [N] positions -> [N] tokens."""


def spread_logits(vocab: int = 24) -> np.ndarray:
    tail = np.geomspace(0.2, 1e-3, vocab - 1)
    probability = np.concatenate([[0.3], tail * 0.7 / tail.sum()])
    order = np.random.default_rng(5).permutation(vocab)
    # Logits are not normalized.
    return np.log(probability[order]).astype(np.float32) + np.float32(2.5)


def draw_tokens(
    draw: Draw, logits: np.ndarray, params: SamplingParams, positions: int = POSITIONS
) -> np.ndarray:
    tokens = []
    for start in range(0, positions, CHUNK):
        chunk = np.arange(start, min(start + CHUNK, positions), dtype=np.int64)
        tokens.append(draw(np.broadcast_to(logits, (len(chunk), len(logits))), chunk, params))
    return np.concatenate(tokens)


def frequency_pvalue(
    draw: Draw, logits: np.ndarray, params: SamplingParams, positions: int = POSITIONS
) -> float:
    """Of chi-square, which sees a bias of many tokens, and of the largest deviation of one."""
    probability = exact_probabilities(logits, params)
    counts = np.bincount(draw_tokens(draw, logits, params, positions), minlength=len(logits))
    assert counts[probability == 0].sum() == 0, "a removed token was drawn"
    expected = probability * positions
    rare = expected < 10
    counts, expected = [
        np.append(values[~rare], values[rare].sum()) if expected[rare].sum() else values[~rare]
        for values in (counts, expected)
    ]
    if len(expected) == 1:
        return 1.0
    deviation = np.abs(counts - expected) / np.sqrt(expected * (1 - expected / positions))
    single = 2 * norm.sf(deviation.max()) * len(counts)  # of the largest of so many deviations
    return float(min(1.0, 2 * min(single, chisquare(counts, expected).pvalue)))


def dependence_pvalue(first: np.ndarray, second: np.ndarray, logits: np.ndarray, params) -> float:
    vocab = len(logits)
    pairs = np.bincount(first * vocab + second, minlength=vocab**2).reshape(vocab, vocab)
    common = exact_probabilities(logits, params) > 0.02  # so that all cells have > 100 counts
    return float(chi2_contingency(pairs[common][:, common]).pvalue)


def lag_pvalue(draw: Draw, logits: np.ndarray, params: SamplingParams, lag: int) -> float:
    tokens = draw_tokens(draw, logits, params)
    return dependence_pvalue(tokens[:-lag], tokens[lag:], logits, params)


CASES = {
    "plain": SamplingParams(temperature=1.0, seed=1),
    "cool": SamplingParams(temperature=0.6, seed=2),
    "hot": SamplingParams(temperature=1.7, seed=3),
    "seed of 64 bits": SamplingParams(temperature=1.0, seed=2**64 - 12345),
    "top-k": SamplingParams(temperature=1.0, top_k=5, seed=4),
    "top-k 1": SamplingParams(temperature=1.0, top_k=1, seed=4),
    "top-p": SamplingParams(temperature=0.9, top_p=0.8, seed=5),
    "min-p": SamplingParams(temperature=1.2, seed=7, min_p=0.05),
    "all three": SamplingParams(temperature=1.3, top_k=12, top_p=0.9, seed=8, min_p=0.1),
    "top-k and top-p": SamplingParams(temperature=1.3, top_k=12, top_p=0.7, seed=6),
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_tokens_are_as_frequent_as_their_probabilities_say(params):
    assert frequency_pvalue(sample, spread_logits(), params) > SOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "positions"),
    [
        (SamplingParams(temperature=1.0, seed=7), 20_000),
        (SamplingParams(temperature=1.0, top_p=0.95, seed=8), 8_000),
        (SamplingParams(temperature=1.5, top_k=200, seed=9), 8_000),
        # keeps more than MAX_CANDIDATES
        (SamplingParams(temperature=1.5, seed=10, min_p=1e-4), 8_000),
    ],
    ids=["plain", "top-p", "top-k", "min-p"],
)
def test_frequencies_with_a_large_vocabulary(params, positions):
    logits = np.random.default_rng(11).normal(0, 2.5, 1501).astype(np.float32)
    assert frequency_pvalue(sample, logits, params, positions) > SOUND


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize(
    "params", [CASES["plain"], CASES["top-k and top-p"]], ids=["plain", "truncated"]
)
def test_positions_are_independent(params, lag):
    assert lag_pvalue(sample, spread_logits(), params, lag) > SOUND


@pytest.mark.slow
def test_seeds_are_independent():
    logits = spread_logits()
    requests = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2)]
    first, second = (draw_tokens(sample, logits, params) for params in requests)
    assert dependence_pvalue(first, second, logits, CASES["plain"]) > SOUND


def tilted(logits: np.ndarray, positions: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The likeliest token gets 2 % more than its due."""
    logits = logits.copy()
    # Its probability, 0.3, grows by the factor 1.02; those of the others, 0.7, lose as much.
    boost = params.temperature * np.log(1.02 / (1 - 0.02 * 0.3 / 0.7))
    logits[:, logits[0].argmax()] += np.float32(boost)
    return sample(logits, positions, params)


def test_a_biased_sampler_is_caught():
    assert frequency_pvalue(tilted, spread_logits(), CASES["plain"]) < BIASED


@pytest.mark.parametrize(
    ("lag", "repeat"),
    [
        (1, lambda n: n - n % 2),  # 0 0 2 2 4 4
        (2, lambda n: n - 2 * (n // 2 % 2)),  # 0 1 0 1 4 5 4 5
        (1, lambda n: n - (n % 50 == 1)),  # every 50th position repeats the position before
    ],
    ids=["neighbour", "one apart", "rarely"],
)
def test_repeated_noise_is_caught(lag, repeat):
    def repeating(logits, positions, params):
        return sample(logits, repeat(positions), params)

    assert lag_pvalue(repeating, spread_logits(), CASES["plain"], lag) < BIASED


@pytest.mark.slow
@pytest.mark.parametrize("min_p", [0.0, 0.9])
def test_every_token_can_be_drawn_without_truncation(min_p):
    params = SamplingParams(temperature=1.0, seed=3, min_p=min_p)
    tokens = draw_tokens(sample, np.zeros(1501, np.float32), params, 20_000)
    # Each token is expected 13 times; the probability that any is missing is 2e-3.
    assert len(np.unique(tokens)) == 1501
