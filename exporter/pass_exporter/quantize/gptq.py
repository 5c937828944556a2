"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): rounds weights input by input, and changes those of
later inputs to compensate for the error in the layer's output. A layer is rounded when the text
reaches it, so its Hessian (the sum of x x^T over its input rows x) is that of rounded layers before
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from pass_exporter.progress import Step
from pass_exporter.quantize.rounding import QuantizedWeight, choose_scales, fits, nearest, pack
from pass_exporter.quantize.spec import WeightScheme
from pass_exporter.quantize.weights import LM_HEAD, input_groups, quantized_modules, set_weight
from pass_exporter.threads import one_thread

DAMPING = 0.01
"""This times its mean is added to the Hessian's diagonal, which makes it positive definite."""
MAX_DIRECT_SIZE = 128
OUTPUTS_PER_BATCH = 2048
"""Their weights in a block of inputs fit into a core's cache."""


@torch.no_grad()
def gptq_model(
    model: PreTrainedModel, schemes: Mapping[str, WeightScheme], ids: torch.Tensor, step: Step
) -> dict[str, QuantizedWeight]:
    """Round the layers of `schemes` that fit, in place. Return the codes by layer. ids: text
    [N,T]."""
    modules, rounded = quantized_modules(model), dict[str, QuantizedWeight]()

    def weight_of(name: str) -> torch.Tensor:
        return modules[name].get_parameter("weight").detach()

    fitting = {name for name, scheme in schemes.items() if fits(scheme, weight_of(name))}

    def round_readers(names: Sequence[str], x: torch.Tensor) -> None:
        factor = inverse_factor(hessian(x))
        for name in names:
            rounded[name] = gptq_weight(schemes[name], weight_of(name), factor)
            with one_thread():
                set_weight(modules[name], rounded[name].dequantized())
        step(len(rounded), len(fitting))

    groups = [[name for name in group if name in fitting] for group in input_groups(model)]
    handles = [
        modules[names[0]].register_forward_pre_hook(
            lambda _, inputs, names=names: round_readers(names, inputs[0])
        )
        for names in groups
        if names
    ]
    try:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    if LM_HEAD in fitting:
        round_readers((LM_HEAD,), hidden)
    return rounded


def hessian(x: torch.Tensor) -> torch.Tensor:
    """Return the Hessian [in,in] float32 of rows x [...,in]."""
    rows = x.flatten(0, -2).float()
    return rows.T @ rows


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular U [in,in] with U^T U the inverse of the damped Hessian: the
    inverse of R in R R^T, its Cholesky decomposition with the inputs in reverse order."""
    reversed_hessian, diagonal = hessian.flip(0, 1), hessian.diagonal()
    # The clamp makes the damping positive even if all inputs are 0.
    reversed_hessian.diagonal().add_(
        DAMPING * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny / DAMPING)
    )
    with one_thread():
        return _inverse_upper(torch.linalg.cholesky(reversed_hessian).flip(0, 1))


def _inverse_upper(matrix: torch.Tensor) -> torch.Tensor:
    size = len(matrix)
    inverse = torch.zeros_like(matrix)
    if size <= MAX_DIRECT_SIZE:
        return inverse.copy_(torch.linalg.solve_triangular(matrix, torch.eye(size), upper=True))
    half = size // 2
    first, last = inverse[:half, :half], inverse[half:, half:]
    first.copy_(_inverse_upper(matrix[:half, :half]))
    last.copy_(_inverse_upper(matrix[half:, half:]))
    torch.mm(first @ matrix[:half, half:], last, out=inverse[:half, half:]).neg_()
    return inverse


def gptq_weight(
    scheme: WeightScheme, weight: torch.Tensor, factor: torch.Tensor
) -> QuantizedWeight:
    """Round a weight [out,in] so that the layer's output changes little. factor:
    `inverse_factor`."""
    with one_thread():
        parts = [
            _gptq_outputs(scheme, outputs, factor)
            for outputs in torch.split(weight, OUTPUTS_PER_BATCH)
        ]
    data, scales, zero_points = (torch.cat([part[i] for part in parts]) for i in range(3))
    return QuantizedWeight(scheme.stored, data, scales, zero_points if scheme.zero_points else None)


def _gptq_outputs(
    scheme: WeightScheme, weight: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = scheme.block_size
    assert size is not None
    # [in,out]: the weights of an input are contiguous. Compensation changes them.
    weights = weight.float().T.contiguous()
    codes, diagonal = torch.empty_like(weights), factor.diagonal()
    scales, zeros = (torch.empty(len(weights) // size, weights.shape[1]) for _ in range(2))
    for index, start in enumerate(range(0, len(weights), size)):
        stop = start + size
        block = weights[start:stop]
        # After compensation, an error e of weight i adds (e / diagonal[i])^2 to the output's error.
        scale, zero = choose_scales(scheme, block.T, weight.dtype, diagonal[start:stop] ** -2)
        scale, zero = scales[index], zeros[index] = scale[:, 0], zero[:, 0]
        errors = torch.empty_like(block)
        for i in range(size):
            row = start + i
            codes[row] = nearest(scheme, block[i], scale, zero)
            errors[i] = (block[i] - (codes[row] - zero) * scale) / diagonal[row]
            block[i + 1 :].addr_(factor[row, row + 1 : stop], errors[i], alpha=-1)
        # For later blocks, one product for the whole block is faster than one for each input.
        weights[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return pack(scheme, codes.T.contiguous()), scales.T.to(weight.dtype), zeros.T.to(torch.uint8)
