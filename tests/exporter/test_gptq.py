"""GPTQ: errors of a layer's outputs, which are smaller than by plain rounding, and the rounding of
whole models."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import make_model
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_exporter.quantize.gptq import (
    gptq_model,
    gptq_weight,
    hessian,
    inverse_factor,
)
from pass_exporter.quantize.rounding import round_to
from pass_exporter.quantize.spec import INT4, INT8, SPECS, WeightScheme
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
    model = load_model(resolve(str(make_model(tmp_path / family, family))), "fp32").model
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
