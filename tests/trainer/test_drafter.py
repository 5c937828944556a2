"""The trainer's forward pass in two steps against a plain pass of the model in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from conftest import make_model
from pass_exporter.model.adapter import Adapter, linear_layers, truncated
from pass_exporter.model.head import candidates, new_head
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_trainer.drafter import ADAPTED_LAYERS, Drafter, new_adapter
from pass_trainer.windows import make_windows

ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {"sliding_window": 6},
    "gemma": {},
    "gemma3_text": ALTERNATING,
    "olmo2": {},
}
"""The sliding windows are shorter than the texts of these tests."""


def random_adapter(model: PreTrainedModel) -> Adapter:
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
def test_drafts_equal_a_plain_pass(model: PreTrainedModel):
    """The plain pass reads the tokens up to an anchor and its look-ahead rows; a mask limits the
    adapter to these rows."""
    embeddings = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    drafter = Drafter(model, embeddings, random_adapter(model))
    tokens = torch.randint(2, 300, (1, 20), generator=torch.Generator().manual_seed(3))
    groups = [0] * 20
    groups[5], groups[11] = 4, 2
    drafts, targets = drafter.log_probs(tokens, make_windows([groups], 20))
    start = 0
    for anchor in (5, 11):
        size = groups[anchor]
        committed = model.get_input_embeddings()(tokens[:, : anchor + 1])
        rows = torch.arange(anchor + 1 + size) > anchor

        def add(y, x, i, rows=rows):
            return torch.where(rows[:, None], y + drafter.adapter.delta(i, x), y)

        with drafter.adapter.attached(model, add):
            logits = model(inputs_embeds=torch.cat([committed, embeddings[None, :size]], 1)).logits[
                0
            ]
        torch.testing.assert_close(
            drafts[start : start + size], logits[anchor + 1 :].log_softmax(-1), atol=1e-3, rtol=1e-3
        )
        start += size
    expected = model(tokens).logits[0].log_softmax(-1)
    torch.testing.assert_close(targets, expected[[6, 7, 8, 9, 12, 13]], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_token_rows_are_the_base_models_bit_for_bit(model: PreTrainedModel):
    tokens = torch.randint(2, 300, (2, 16))
    windows = make_windows([[0, 3] * 6 + [0] * 4, [1] * 15 + [0]], 16)
    embeddings = torch.randn(3, 64)
    plain = Drafter(model, embeddings, None).log_probs(tokens, windows)
    adapted = Drafter(model, embeddings, random_adapter(model)).log_probs(tokens, windows)
    assert torch.equal(plain[1], adapted[1])
    assert not torch.allclose(plain[0], adapted[0])


def test_gradients_reach_the_trained_parameters_and_not_the_model(model: PreTrainedModel):
    drafter = Drafter(model, torch.randn(3, 64), random_adapter(model))
    drafter(torch.randint(2, 300, (1, 16)), make_windows([[0, 3] * 6 + [0] * 4], 16)).backward()
    trained = list(drafter.parameters())
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in trained)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(trained) == 1 + 2 * len(ADAPTED_LAYERS) * model.config.num_hidden_layers


def test_the_adapter_is_gone_after_the_pass(model: PreTrainedModel):
    Drafter(model, torch.randn(3, 64), random_adapter(model)).log_probs(
        torch.ones(1, 8, dtype=torch.long), make_windows([[3] * 4 + [0] * 4], 8)
    )
    assert all(not layer._forward_hooks for layer in linear_layers(model).values())


def test_an_adapter_is_cut_to_its_main_directions(model: PreTrainedModel):
    """The error is that of the singular values that are left out: 0 at the rank of the adapter."""
    adapter = random_adapter(model)
    for rank in (1, 2, 3):
        cut = truncated(adapter, rank)
        assert cut.names == adapter.names and cut.rank == rank
        for i in range(len(adapter.names)):
            whole = adapter.lora_B[i].detach() @ adapter.lora_A[i].detach()
            lost = whole - cut.lora_B[i].detach() @ cut.lora_A[i].detach()
            expected = torch.linalg.svdvals(whole)[rank:].square().sum().sqrt()
            torch.testing.assert_close(lost.norm(), expected, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_the_head_computes_the_recurrence_of_its_docstring(model: PreTrainedModel):
    """All rows of groups of several sizes at once, against one row after another."""
    head = new_head(model.get_output_embeddings().weight, 6, 8, torch.Generator().manual_seed(0))
    head.out.normal_(generator=torch.Generator().manual_seed(1))
    drafter = Drafter(
        model, torch.randn(4, 64, generator=torch.Generator().manual_seed(2)), None, head
    )
    tokens = torch.randint(2, 300, (1, 20), generator=torch.Generator().manual_seed(3))
    groups = [0] * 20
    groups[5], groups[6], groups[11] = 4, 1, 2
    windows = make_windows([groups], 20)
    hidden, _, _ = drafter.row_states(tokens, windows)
    logits = drafter.logits(hidden)
    drafts, _ = drafter.log_probs(tokens, windows)
    state = torch.zeros(8)
    for row, (index, depth) in enumerate(
        zip(windows.lookahead_index[0].tolist(), windows.position[0].tolist(), strict=True)
    ):
        state = state if index else torch.zeros(8)
        table = head.table[tokens[0, depth]]
        state = head.hidden @ hidden[row] + head.token @ table + head.state @ state + head.bias
        state = torch.nn.functional.silu(state)
        expected = logits[row] + head.table @ (head.out @ state)
        torch.testing.assert_close(drafts[row], expected.log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_candidates_hold_the_likeliest_tokens():
    logits = torch.randn(3, 5, 4096, generator=torch.Generator().manual_seed(0))
    ids = candidates(logits)
    assert ids.shape == (3, 5, 512)
    best = logits.topk(64, -1).indices
    assert bool((best[..., None] == ids[..., None, :]).any(-1).all())
    assert all(len(set(row.tolist())) == 512 for row in ids.reshape(-1, 512))
    assert candidates(logits[..., :500]).shape == (3, 5, 500)
