from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from conftest import VOCAB_SIZE
from pass_runtime import GenerateOptions, SamplingParams, Session, load

PROMPT = "The quick brown fox jumps over"
NEAR_TIE = 2e-3
"""The largest margin between two scores that float32 rounding can exchange."""


class OpenAiPenalties:
    """A logits processor of transformers with the formula of OpenAI's API reference: it lowers the
    scores of the tokens that were written after the prompt."""

    def __init__(self, prompt_length: int, frequency: float, presence: float) -> None:
        self._prompt_length, self._frequency, self._presence = prompt_length, frequency, presence

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        count = torch.bincount(ids[0, self._prompt_length :], minlength=scores.shape[-1])
        return scores - self._frequency * count - self._presence * (count > 0)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def bundle_session(random_bundle: Path) -> Session:
    return load(random_bundle, "cpu", threads=1)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    frequency=st.sampled_from([0.0, 0.6, -0.4]),
    presence=st.sampled_from([0.0, 1.1, -0.7]),
    repetition=st.sampled_from([1.0, 1.4, 0.7]),
    bias=st.dictionaries(st.integers(4, 120), st.sampled_from([-6.0, -1.5, 2.5, 5.0]), max_size=12),
    min_tokens=st.sampled_from([0, 7]),
    bad_tokens=st.sampled_from([(), (11, 40), (7,)]),
    plan=st.sampled_from(["ar", "two-pass", "fused"]),
)
def test_every_token_has_the_highest_processed_score(
    model: torch.nn.Module,
    bundle_session: Session,
    frequency: float,
    presence: float,
    repetition: float,
    bias: dict[int, float],
    min_tokens: int,
    bad_tokens: tuple[int, ...],
    plan: str,
):
    prompt = bundle_session.encode(PROMPT)
    end = bundle_session.manifest.model.eos_token_ids[0]
    penalties = {"frequency_penalty": frequency, "presence_penalty": presence}
    sampling = SamplingParams(repetition_penalty=repetition, logit_bias=bias, **penalties)
    allowed = [t for t in range(VOCAB_SIZE) if t not in bad_tokens]
    limits = {"min_tokens": min_tokens, "stop_token_ids": [end], "allowed_token_ids": allowed}
    options = GenerateOptions(32, sampling, plan=plan, ignore_eos=True, **limits)
    written = bundle_session.generate_ids(prompt, options).result().token_ids
    processors = LogitsProcessorList()
    if bias:
        biases = [[[token], value] for token, value in bias.items()]
        processors.append(SequenceBiasLogitsProcessor(biases))
    processors.append(RepetitionPenaltyLogitsProcessor(repetition))
    processors.append(OpenAiPenalties(len(prompt), frequency, presence))
    if bad_tokens:
        bad_words = [[token] for token in bad_tokens]
        processors.append(NoBadWordsLogitsProcessor(bad_words, eos_token_id=end))
    processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, end, device="cpu"))
    ids = list(prompt)
    for token in written:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[:, -1].float()
        scores = processors(torch.tensor([ids]), logits)[0]
        assert scores.max() - scores[token] < NEAR_TIE, (ids, token, int(scores.argmax()))
        ids.append(token)
