"""The probability that a draft is accepted, and the loss that is made from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pass_exporter.model.head import new_head
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_trainer.acceptance import acceptance_probability
from pass_trainer.drafter import Drafter
from pass_trainer.windows import make_windows


def pair(seed: int, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [V] of a model and of a draft that is near to it."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, generator=random)
    return logits.log_softmax(-1), (logits + torch.randn(tokens, generator=random)).log_softmax(-1)


@pytest.mark.parametrize("seed", range(4))
def test_the_probability_is_the_sum_over_pairs_of_tokens(seed: int):
    target, draft = pair(seed)
    p, q = target.exp(), draft.exp()
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    torch.testing.assert_close(acceptance_probability(target, draft), (1 / ratios.sum(1)).sum())


def test_tokens_drawn_with_the_same_noise_agree_as_often():
    """Also if the draft is chosen from a part of the vocabulary."""
    target, draft = pair(5)
    draft = draft[:9].log_softmax(-1)
    noise = -torch.empty(200_000, 12).exponential_(generator=torch.Generator().manual_seed(0)).log()
    same = (target + noise).argmax(-1) == (draft + noise[:, :9]).argmax(-1)
    found = acceptance_probability(target[:9], draft)
    assert abs(float(found) - float(same.float().mean())) < 0.005  # 4.5 standard errors


def test_the_probability_is_within_its_bounds_and_1_for_equal_distributions():
    for seed in range(20):
        target, draft = pair(seed)
        distance = float((target.exp() - draft.exp()).abs().sum() / 2)
        found = float(acceptance_probability(target, draft))
        assert (1 - distance) / (1 + distance) - 1e-6 <= found <= 1 - distance + 1e-6
        assert float(acceptance_probability(target, target)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("with_head", [False, True])
def test_the_loss_is_a_tenth_distribution_and_nine_tenths_rejection(
    tiny_model: Path, with_head: bool
):
    model = load_model(resolve(str(tiny_model)), "fp32").model
    random = torch.Generator().manual_seed(0)
    head = new_head(model.get_output_embeddings().weight, 6, 8, random) if with_head else None
    rows = torch.randn(4, 64, generator=random)
    tokens = torch.randint(2, 300, (1, 20), generator=random)
    windows = make_windows([[0] * 5 + [4, 0, 3] + [0] * 12], 20)
    with torch.no_grad():
        drafts, targets = Drafter(model, rows, None, head).log_probs(tokens, windows)
        distribution = float(Drafter(model, rows, None, head)(tokens, windows))
        loss = float(Drafter(model, rows, None, head, "acceptance")(tokens, windows))
    rejected = float((1 - acceptance_probability(targets, drafts)).sum()) / 2  # of two anchors
    assert loss == pytest.approx(0.1 * distribution + 0.9 * rejected, rel=1e-4)


def test_gradients_raise_the_probability_and_stay_finite():
    target, draft = pair(7)
    logits = draft.clone()
    logits[3] = -200.0  # its probability is 0 in float32
    logits.requires_grad_(True)
    first = float(acceptance_probability(target, logits.log_softmax(-1)).detach())
    for _ in range(50):
        (gradient,) = torch.autograd.grad(
            acceptance_probability(target, logits.log_softmax(-1)), logits
        )
        assert bool(gradient.isfinite().all())
        logits = (logits + 2 * gradient).detach().requires_grad_(True)
    assert float(acceptance_probability(target, logits.log_softmax(-1)).detach()) > first + 0.1
