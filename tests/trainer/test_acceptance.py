"""The probability that a draft is accepted, and the loss that training makes from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pass_exporter.model.draft_head import new_head
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_trainer.drafter import Drafter, acceptance_probability
from pass_trainer.windows import make_windows

TOKENS = 12


def model_and_draft(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [TOKENS], whose logits differ by noise."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(TOKENS, generator=random)
    draft = logits + torch.randn(TOKENS, generator=random)
    return logits.log_softmax(-1), draft.log_softmax(-1)


@pytest.mark.parametrize("seed", range(4))
def test_the_probability_is_the_sum_over_all_pairs_of_tokens(seed: int):
    target, draft = model_and_draft(seed)
    p, q = target.exp(), draft.exp()
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    torch.testing.assert_close(acceptance_probability(target, draft), (1 / ratios.sum(1)).sum())
    assert float(acceptance_probability(target, target)) == pytest.approx(1, abs=1e-5)


def test_tokens_drawn_with_the_same_noise_agree_with_the_probability():
    """The draft is chosen from the first 9 tokens, as by a head."""
    target, draft = model_and_draft(5)
    draft, samples = draft[:9].log_softmax(-1), 200_000
    random = torch.Generator().manual_seed(0)
    gumbel = -torch.empty(samples, TOKENS).exponential_(generator=random).log()
    agree = (target + gumbel).argmax(-1) == (draft + gumbel[:, :9]).argmax(-1)
    probability = acceptance_probability(target[:9], draft)
    assert abs(float(probability) - float(agree.float().mean())) < 0.005  # 4.5 standard errors


@pytest.mark.parametrize("with_head", [False, True])
def test_the_loss_is_a_tenth_distribution_and_nine_tenths_rejection(
    tiny_model: Path, with_head: bool
):
    model = load_model(resolve(str(tiny_model)), "fp32").model
    random = torch.Generator().manual_seed(0)
    head = new_head(model.get_output_embeddings().weight, 6, 8, random) if with_head else None
    embeddings = torch.randn(4, 64, generator=random)
    tokens = torch.randint(2, 300, (1, 20), generator=random)
    windows = make_windows([[0] * 5 + [4, 0, 3] + [0] * 12], 20)  # anchors 5 and 7
    with torch.no_grad():
        drafts, targets = Drafter(model, embeddings, None, head).log_probs(tokens, windows)
        distribution = float(Drafter(model, embeddings, None, head)(tokens, windows))
        loss = float(Drafter(model, embeddings, None, head, "acceptance")(tokens, windows))
    rejected = float((1 - acceptance_probability(targets, drafts)).sum()) / 2  # mean over anchors
    assert loss == pytest.approx(0.1 * distribution + 0.9 * rejected, rel=1e-4)


def test_gradients_raise_the_probability_and_stay_finite():
    target, draft = model_and_draft(7)
    logits = draft.clone()
    logits[3] = -200.0  # its probability is 0 in float32
    logits.requires_grad_(True)
    probability_before = float(acceptance_probability(target, logits.log_softmax(-1)).detach())
    for _ in range(50):
        probability = acceptance_probability(target, logits.log_softmax(-1))
        (gradient,) = torch.autograd.grad(probability, logits)
        assert bool(gradient.isfinite().all())
        logits = (logits + 2 * gradient).detach().requires_grad_(True)
    probability = acceptance_probability(target, logits.log_softmax(-1))
    assert float(probability.detach()) > probability_before + 0.1
