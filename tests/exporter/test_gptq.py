"""GPTQ: errors of a layer's outputs, which are smaller than by plain rounding, and the rounding of
whole models. And its text: what a model writes, in bf16 where CPUs have it, or a file's."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from checkpoints import load_path
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_model
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.load import LoadedModel
from pass_exporter.quantize import text
from pass_exporter.quantize.gptq import (
    gptq_model,
    gptq_weight,
    hessian,
    inverse_factor,
)
from pass_exporter.quantize.rounding import round_to
from pass_exporter.quantize.spec import INT4, INT8, SPECS, WeightScheme
from pass_exporter.quantize.text import bf16_copy, file_ids, own_ids, uses_bf16
from pass_exporter.quantize.weights import quantized_modules

ASYMMETRIC = SPECS["int4"].with_zero_points().scheme
assert ASYMMETRIC is not None
SCHEMES = {"symmetric": INT4, "zero points": ASYMMETRIC}


def make_rows(rng: torch.Generator, count: int, inputs: int) -> torch.Tensor:
    causes = torch.randn(count, inputs // 4, generator=rng)
    mixing = torch.randn(inputs // 4, inputs, generator=rng)
    return causes @ mixing + 0.1 * torch.randn(count, inputs, generator=rng)


@pytest.mark.parametrize("name", SCHEMES)
@settings(derandomize=True, deadline=None, max_examples=20)
@given(data=st.data())
def test_errors_of_outputs_are_smaller_than_by_plain_rounding(name, data):
    scheme, rng = SCHEMES[name], torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    inputs = 32 * data.draw(st.integers(2, 5))
    weight = torch.randn(24, inputs, generator=rng) * 10.0 ** data.draw(st.integers(-4, 4))
    x = make_rows(rng, 400, inputs)
    packed = gptq_weight(scheme, weight, inverse_factor(hessian(x)))
    assert packed.dequantized().shape == weight.shape and packed.scales.shape == (24, inputs // 32)
    error, plain_error = (
        ((rounded.dequantized() - weight) @ x.T).square().sum()
        for rounded in (packed, round_to(scheme, weight))
    )
    assert error < plain_error * 0.7


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_weights_that_codes_represent_exactly_do_not_change(name: str, dtype: torch.dtype):
    rng = torch.Generator().manual_seed(0)
    scheme = WeightScheme("int4", zero_points=SCHEMES[name].zero_points)
    integers = torch.randint(-7, 8, (16, 96), generator=rng)
    # Every block has the least and the largest code.
    integers[:, ::32], integers[:, 1::32] = -7, 8 if scheme.zero_points else 7
    weight = (integers * 0.125).to(dtype)
    packed = gptq_weight(scheme, weight, inverse_factor(hessian(make_rows(rng, 200, 96))))
    assert packed.scales.dtype == dtype
    assert torch.equal(packed.dequantized(), weight)


@pytest.mark.parametrize("inputs", [32, 127, 300, 544])
def test_the_factor_is_the_cholesky_factor_of_the_inverse_hessian(inputs: int):
    """Such a factor is unique. These sizes are computed in one part or in several."""
    matrix = hessian(make_rows(torch.Generator().manual_seed(0), 2 * inputs, inputs))
    damped = matrix.double() + 0.01 * matrix.diagonal().mean().double() * torch.eye(inputs)
    factor = inverse_factor(matrix).double()
    assert torch.equal(factor, factor.triu()) and (factor.diagonal() > 0).all()
    assert (factor.T @ factor @ damped - torch.eye(inputs)).abs().max() < 1e-3


def test_weights_of_inputs_that_are_always_0_are_rounded_too():
    rng = torch.Generator().manual_seed(0)
    weight, x = torch.randn(4, 64, generator=rng), make_rows(rng, 100, 64)
    x[:, 5:40] = 0
    for rows in (x, torch.zeros_like(x)):
        rounded = gptq_weight(ASYMMETRIC, weight, inverse_factor(hessian(rows))).dequantized()
        assert ((rounded - weight).abs() < 1).all()


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_every_layer_that_has_a_scheme_is_rounded_once(family: str, tmp_path: Path):
    model = load_path(make_model(tmp_path / family, family)).model
    steps: list[tuple[int, int]] = []
    layers = quantized_modules(model)
    schemes = dict.fromkeys(layers, ASYMMETRIC) | {"lm_head": INT4}
    kept = next(name for name in layers if name.endswith("down_proj"))
    schemes.pop(kept)
    for name in layers:
        if name.endswith("o_proj"):
            schemes[name] = INT8
    large = next(name for name in layers if name.startswith("layers.1") and "_proj" in name)
    with torch.no_grad():
        layers[large].weight[0, 0] = 1e5
    before = {name: layers[name].weight.clone() for name in (kept, large)}
    ids = torch.randint(0, 320, (3, 40), generator=torch.Generator().manual_seed(0))
    packed = gptq_model(model, schemes, ids, lambda *step: steps.append(step))
    assert set(packed) == set(schemes) - {large}
    for name, part in packed.items():
        assert part.scheme == schemes[name]
        assert torch.equal(layers[name].weight, part.dequantized())
    assert all(torch.equal(layers[name].weight, weight) for name, weight in before.items())
    assert steps[-1][0] == steps[-1][1] and all(a < b for a, b in itertools.pairwise(steps))
    assert not any(layer._forward_pre_hooks for layer in layers.values())


def no_report(_done: int, _steps: int) -> None:
    pass


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedModel:
    return load_path(tiny_model)


def set_bf16(monkeypatch: pytest.MonkeyPatch, *, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})


def test_bf16_is_used_for_fp32_models_on_cpus_that_have_it(loaded, tiny_model, monkeypatch):
    fp16 = load_path(tiny_model, "fp16").model
    for has_bf16 in (True, False):
        set_bf16(monkeypatch, has_bf16=has_bf16)
        assert uses_bf16(loaded.model) == has_bf16
        assert not uses_bf16(fp16)


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(), reason="lists the CPU's features on Linux alone"
)
def test_torch_names_the_features_of_this_cpu(loaded: LoadedModel):
    words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    assert uses_bf16(loaded.model) == any(word in words for word in text.CPU_FEATURES)


def test_a_copy_in_bf16_does_not_change_the_model(tmp_path: Path):
    model = load_path(make_model(tmp_path / "tied", tie_word_embeddings=True)).model
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    copied = bf16_copy(model)
    assert all(weight.dtype == torch.bfloat16 for weight in copied.parameters())
    assert copied.lm_head.weight is copied.get_input_embeddings().weight
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    ids = torch.arange(8)[None]
    exact, rounded = (each(input_ids=ids).logits.float() for each in (model, copied))
    assert torch.nn.functional.cosine_similarity(rounded, exact, -1).min() > 0.999


def test_a_model_writes_all_its_calibration_sequences_in_one_batch(loaded, monkeypatch):
    set_bf16(monkeypatch, has_bf16=False)
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
    given = text.OWN_TOKENS - len(passes)
    sequences = torch.cat(ids.chunk(text.SEQUENCES_PER_ROW, 1))
    expected = text.SEQUENCES_PER_ROW * [prompt[:given] for prompt in prompts]
    assert sequences[:, :given].tolist() == expected
    assert len({tuple(sequence) for sequence in sequences.tolist()}) == len(sequences)


def test_calibration_sequences_are_no_longer_than_the_capacity(loaded: LoadedModel):
    assert own_ids(loaded.model, loaded.tokenizer, 20, no_report).shape == (16, 20)


@given(st.integers(0, 2**32 - 1))
def test_tokens_are_drawn_as_often_as_they_are_likely(seed: int):
    shares = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    drawn = text._sampled(shares.log().expand(4000, -1), torch.Generator().manual_seed(seed))
    assert drawn.shape == (4000, 1)
    drawn_shares = torch.bincount(drawn.flatten(), minlength=6) / 4000
    assert (drawn_shares - shares).abs().max() < 0.06  # more than seven standard deviations
    assert not drawn_shares[shares == 0].any()


def test_a_file_is_cut_into_sequences_for_calibration(loaded: LoadedModel):
    sentences = "The quick brown fox jumps over the lazy dog. " * 1000
    assert file_ids(loaded.tokenizer, sentences).shape == (24, 256)
