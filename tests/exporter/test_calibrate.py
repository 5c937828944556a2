"""Calibration: the text that a model writes for it, products in bf16, scales and their losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import make_model
from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.registry import resolve
from pass_exporter.quantize import bf16, calibrate, text
from pass_exporter.quantize.bf16 import bf16_autocast, bf16_copy, uses_bf16
from pass_exporter.quantize.calibrate import (
    CLIPS,
    StaticScale,
    channel_maxima,
    round_activations,
    static_scales,
)
from pass_exporter.quantize.points import QuantPoint, find_points
from pass_exporter.quantize.spec import INT8_BY_OUTPUT
from pass_exporter.quantize.text import own_ids


def no_report(_done: int, _steps: int) -> None:
    pass


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedModel:
    return load_model(resolve(str(tiny_model)), "fp32")


def on_a_cpu(monkeypatch: pytest.MonkeyPatch, *, has_bf16: bool) -> None:
    """Make the CPU seem to have products in bf16, or to lack them; torch computes them anyway."""
    feature = {"avx512_bf16": has_bf16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: feature)


def test_bf16_is_used_on_cpus_that_multiply_it(
    loaded: LoadedModel, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    half = load_model(resolve(str(tiny_model)), "fp16").model
    for there in (True, False):
        on_a_cpu(monkeypatch, has_bf16=there)
        assert uses_bf16(loaded.model) == there
        assert not uses_bf16(half)
        with bf16_autocast(loaded.model):
            assert torch.is_autocast_enabled("cpu") == there


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(), reason="lists the CPU's features on Linux alone"
)
def test_torch_names_the_features_of_this_cpu(loaded: LoadedModel):
    words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    assert uses_bf16(loaded.model) == any(word in words for word in bf16.CPU_FEATURES)


def test_a_copy_in_bf16_does_not_change_the_model(tmp_path: Path):
    model = load_model(
        resolve(str(make_model(tmp_path / "tied", tie_word_embeddings=True))), "fp32"
    ).model
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    copied = bf16_copy(model)
    assert all(weight.dtype == torch.bfloat16 for weight in copied.parameters())
    assert copied.lm_head.weight is copied.get_input_embeddings().weight
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    ids = torch.arange(8)[None]
    expected, found = (each(input_ids=ids).logits.float() for each in (model, copied))
    assert torch.nn.functional.cosine_similarity(found, expected, -1).min() > 0.999


def test_a_model_writes_all_its_calibration_sequences_at_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
):
    on_a_cpu(monkeypatch, has_bf16=False)
    passes, steps = [], []
    handle = loaded.model.model.register_forward_hook(lambda *_: passes.append(1))
    try:
        ids = own_ids(
            loaded.model, loaded.tokenizer, 700, lambda done, total: steps.append((done, total))
        )
    finally:
        handle.remove()
    assert ids.shape == (
        text.OWN_SEQUENCES // text.SEQUENCES_PER_ROW,
        text.OWN_TOKENS * text.SEQUENCES_PER_ROW,
    )
    assert ids.numel() >= 3000
    assert len(passes) == len(steps) < text.OWN_TOKENS
    assert steps[-1] == (text.OWN_TOKENS, text.OWN_TOKENS)
    prompts = [
        loaded.tokenizer.backend_tokenizer.encode(p, add_special_tokens=False).ids
        for p in text.PROMPTS
    ]
    begun = text.OWN_TOKENS - len(passes)
    pieces = torch.cat(ids.chunk(text.SEQUENCES_PER_ROW, 1))
    assert pieces[:, :begun].tolist() == text.SEQUENCES_PER_ROW * [
        prompt[:begun] for prompt in prompts
    ]
    assert len({tuple(piece) for piece in pieces.tolist()}) == len(pieces)


def test_calibration_sequences_are_no_longer_than_the_capacity(loaded: LoadedModel):
    assert own_ids(loaded.model, loaded.tokenizer, 20, no_report).shape == (16, 20)


@given(st.integers(0, 2**32 - 1))
def test_tokens_are_drawn_as_often_as_they_are_likely(seed: int):
    shares = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    drawn = text._sampled(shares.log().expand(4000, -1), torch.Generator().manual_seed(seed))
    assert drawn.shape == (4000, 1)
    found = torch.bincount(drawn.flatten(), minlength=6) / 4000
    assert (found - shares).abs().max() < 0.06  # more than seven standard deviations
    assert not found[shares == 0].any()


def scales(loaded: LoadedModel) -> dict[QuantPoint, StaticScale]:
    model, ids = loaded.model, torch.arange(8 * 24).reshape(8, 24) % 300
    maxima = channel_maxima(model, find_points(model), ids[:4], no_report)
    return static_scales(model, maxima, INT8_BY_OUTPUT, ids[4:], no_report)


def test_scales_do_not_depend_on_batches(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    on_a_cpu(monkeypatch, has_bf16=False)
    found = []
    for tokens in (1, 1000):
        monkeypatch.setattr(calibrate, "BATCH_TOKENS", tokens)
        found.append(scales(loaded))
    for point, one in found[0].items():
        other = found[1][point]
        assert one.scale == pytest.approx(other.scale, rel=1e-5) and one.loss == pytest.approx(
            other.loss, rel=1e-3
        )


def test_bf16_estimates_the_same_losses(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    on_a_cpu(monkeypatch, has_bf16=False)
    expected = scales(loaded)
    on_a_cpu(monkeypatch, has_bf16=True)
    for point, found in scales(loaded).items():
        assert found.loss == pytest.approx(expected[point].loss, rel=0.2), point
        assert found.scale / expected[point].scale == pytest.approx(1, rel=0.3), point


def test_the_cost_of_clipping_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch):
    random = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(3, 7, 11, generator=random) for _ in range(2))
    monkeypatch.setattr(calibrate, "CHUNK_ELEMENTS", 50)
    found = calibrate._clip_losses(x, gradient, 0.02)
    weight = (gradient / calibrate.LOSS_SCALE).square() / 2
    expected = [
        float((weight * (round_activations(x, 0.02 * clip) - x).square()).sum()) for clip in CLIPS
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
