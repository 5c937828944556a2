"""The trainer's forward pass against plain passes of the model, the probability that a draft is
accepted, and the loss that training makes from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from conftest import make_model
from pass_exporter.model.adapter import Adapter, linear_layers, truncated
from pass_exporter.model.draft_head import candidates, new_head
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_trainer.drafter import ADAPTED_LAYERS, Drafter, acceptance_probability, new_adapter
from pass_trainer.train import make_optimizer
from pass_trainer.windows import make_windows

ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {"sliding_window": 6},
    "gemma": {},
    "gemma3_text": ALTERNATING,
    "olmo2": {},
}
"""Texts are longer than the sliding windows."""


def random_adapter(model: PreTrainedModel) -> Adapter:
    """Its B have an effect, as a new adapter's have not."""
    adapter = new_adapter(model, 3, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for b in adapter.lora_B:
            b.normal_(generator=torch.Generator().manual_seed(1))
    return adapter


@pytest.fixture(scope="module", params=FAMILIES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PreTrainedModel:
    config = FAMILIES[request.param]
    directory = make_model(
        tmp_path_factory.mktemp("models") / request.param, request.param, **config
    )
    return load_model(resolve(str(directory)), "fp32").model


@torch.no_grad()
def test_drafts_are_those_of_a_plain_pass_over_an_anchor_and_its_look_ahead_rows(model):
    embeddings = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    drafter = Drafter(model, embeddings, random_adapter(model))
    tokens = torch.randint(2, 300, (1, 20), generator=torch.Generator().manual_seed(3))
    groups = [0] * 20
    groups[5], groups[11] = 4, 2
    drafts, targets = drafter.log_probs(tokens, make_windows([groups], 20))
    start = 0  # the index in `drafts` of the anchor's first look-ahead row
    for anchor in (5, 11):
        size = groups[anchor]
        committed = model.get_input_embeddings()(tokens[:, : anchor + 1])
        inputs = torch.cat([committed, embeddings[None, :size]], 1)
        is_lookahead_row = torch.arange(anchor + 1 + size) > anchor

        def add(y, x, i, rows=is_lookahead_row):
            return torch.where(rows[:, None], y + drafter.adapter.delta(i, x), y)

        with drafter.adapter.attached(model, add):
            logits = model(inputs_embeds=inputs).logits[0]
        expected = logits[anchor + 1 :].log_softmax(-1)
        torch.testing.assert_close(drafts[start : start + size], expected, atol=1e-3, rtol=1e-3)
        start += size
    # A look-ahead row learns the model's distribution after the token at the row's own position.
    expected = model(tokens).logits[0].log_softmax(-1)[[6, 7, 8, 9, 12, 13]]
    torch.testing.assert_close(targets, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_an_adapter_changes_no_bit_of_the_rows_of_tokens(model: PreTrainedModel):
    tokens = torch.randint(2, 300, (2, 16))
    windows = make_windows([[0, 3] * 6 + [0] * 4, [1] * 15 + [0]], 16)
    embeddings = torch.randn(3, 64)
    adapter = random_adapter(model)
    plain_drafts, plain_targets = Drafter(model, embeddings, None).log_probs(tokens, windows)
    drafts, targets = Drafter(model, embeddings, adapter).log_probs(tokens, windows)
    assert torch.equal(plain_targets, targets)
    assert not torch.allclose(plain_drafts, drafts)


def test_only_the_trained_parameters_get_gradients(model: PreTrainedModel):
    drafter = Drafter(model, torch.randn(3, 64), random_adapter(model))
    drafter(torch.randint(2, 300, (1, 16)), make_windows([[0, 3] * 6 + [0] * 4], 16)).backward()
    trained = list(drafter.parameters())
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in trained)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(trained) == 1 + 2 * len(ADAPTED_LAYERS) * model.config.num_hidden_layers


def test_a_pass_leaves_no_hooks_of_the_adapter_in_the_model(model: PreTrainedModel):
    Drafter(model, torch.randn(3, 64), random_adapter(model)).log_probs(
        torch.ones(1, 8, dtype=torch.long), make_windows([[3] * 4 + [0] * 4], 8)
    )
    assert all(not layer._forward_hooks for layer in linear_layers(model).values())


def test_truncating_an_adapter_loses_its_smallest_singular_values_alone(model: PreTrainedModel):
    adapter = random_adapter(model)
    for rank in (1, 2, 3):
        cut = truncated(adapter, rank)
        assert cut.names == adapter.names and cut.rank == rank
        for i in range(len(adapter.names)):
            whole = adapter.lora_B[i].detach() @ adapter.lora_A[i].detach()
            lost = whole - cut.lora_B[i].detach() @ cut.lora_A[i].detach()
            expected = torch.linalg.svdvals(whole)[rank:].square().sum().sqrt()
            torch.testing.assert_close(lost.norm(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("is_new", "rate_of_b"), [(True, 8e-3), (False, 1e-3)])
def test_the_optimizer_steps_every_part_at_its_rate(model: PreTrainedModel, is_new, rate_of_b):
    adapter = new_adapter(model, 3, torch.Generator()) if is_new else random_adapter(model)
    head = new_head(model.get_output_embeddings().weight, 6, 8, torch.Generator())
    drafter = Drafter(model, torch.randn(4, 64), adapter, head)
    before = {name: value.detach().clone() for name, value in drafter.named_parameters()}
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    make_optimizer(drafter, 1e-3).step()  # Adam's first step is the learning rate
    for name, value in drafter.named_parameters():
        rate = 1e-2 if name == "lookahead" else rate_of_b if "lora_B" in name else 1e-3
        torch.testing.assert_close(
            before[name] - value, torch.full_like(value, rate), atol=1e-6, rtol=0
        )


@torch.no_grad()
def test_the_head_computes_the_recurrence_of_its_docstring(model: PreTrainedModel):
    """One row after another."""
    head = new_head(model.get_output_embeddings().weight, 6, 8, torch.Generator().manual_seed(0))
    head.out.normal_(generator=torch.Generator().manual_seed(1))  # a new head has 0 there
    embeddings = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    drafter = Drafter(model, embeddings, None, head)
    tokens = torch.randint(2, 300, (1, 20), generator=torch.Generator().manual_seed(3))
    groups = [0] * 20
    groups[5], groups[6], groups[11] = 4, 1, 2
    windows = make_windows([groups], 20)
    hidden, _, _ = drafter.row_states(tokens, windows)
    logits = drafter.logits(hidden)
    drafts, _ = drafter.log_probs(tokens, windows)
    indices, positions = windows.lookahead_index[0].tolist(), windows.position[0].tolist()
    for row, (index, position) in enumerate(zip(indices, positions, strict=True)):
        if index == 0:  # the first row of a group
            state = torch.zeros(8)
        token = head.table[tokens[0, position]]
        state = head.hidden @ hidden[row] + head.token @ token + head.state @ state + head.bias
        state = torch.nn.functional.silu(state)
        expected = logits[row] + head.table @ (head.out @ state)
        torch.testing.assert_close(drafts[row], expected.log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_candidates_hold_the_likeliest_tokens():
    logits = torch.randn(3, 5, 4096, generator=torch.Generator().manual_seed(0))
    ids = candidates(logits)
    assert ids.shape == (3, 5, 512)
    likeliest = logits.topk(64, -1).indices
    assert bool((likeliest[..., None] == ids[..., None, :]).any(-1).all())
    assert all(len(set(row.tolist())) == 512 for row in ids.reshape(-1, 512))
    assert candidates(logits[..., :500]).shape == (3, 5, 500)


TOKENS = 12


def target_and_draft(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [TOKENS], whose logits differ by noise."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(TOKENS, generator=random)
    draft = logits + torch.randn(TOKENS, generator=random)
    return logits.log_softmax(-1), draft.log_softmax(-1)


@pytest.mark.parametrize("seed", range(4))
def test_the_probability_is_the_sum_over_all_pairs_of_tokens(seed: int):
    target, draft = target_and_draft(seed)
    p, q = target.exp(), draft.exp()
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    torch.testing.assert_close(acceptance_probability(target, draft), (1 / ratios.sum(1)).sum())
    assert float(acceptance_probability(target, target)) == pytest.approx(1, abs=1e-5)


def test_tokens_drawn_with_the_same_noise_agree_with_the_probability():
    """The draft is chosen from the first 9 tokens, as by a head."""
    target, draft = target_and_draft(5)
    draft, samples = draft[:9].log_softmax(-1), 200_000
    random = torch.Generator().manual_seed(0)
    gumbel = -torch.empty(samples, TOKENS).exponential_(generator=random).log()
    agree = (target + gumbel).argmax(-1) == (draft + gumbel[:, :9]).argmax(-1)
    probability = acceptance_probability(target[:9], draft)
    assert abs(float(probability) - float(agree.float().mean())) < 0.005  # 4.5 standard errors


@pytest.mark.parametrize("with_head", [False, True])
def test_the_loss_is_a_tenth_distribution_and_nine_tenths_rejection(tiny_model, with_head):
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
    target, draft = target_and_draft(7)
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
