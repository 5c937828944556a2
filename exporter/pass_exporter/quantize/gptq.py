"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): rounds weights one input after another, and changes
the weights of later inputs to compensate for the error in the layer's output.

The Hessian of a layer, the sum of x x^T over its input rows x, says how well one input can
compensate for another. Text runs through the model once. A layer is rounded when the text reaches
it, so its Hessian is computed from the outputs of layers that are rounded already.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from pass_exporter.progress import Step
from pass_exporter.quantize.rounding import QuantizedWeight, choose_scales, fits, nearest, pack
from pass_exporter.quantize.spec import WeightScheme
from pass_exporter.quantize.weights import LM_HEAD, input_groups, quantized_modules, set_weight
from pass_exporter.threads import one_thread

DAMPING = 0.01
"""This times its mean is added to the Hessian's diagonal, to make the Hessian positive definite."""
FORECAST_MINUTES, FORECAST_SHARE = 30, 0.02
"""After FORECAST_SHARE of the work, a warning says how long all of it will take, if that is more
than FORECAST_MINUTES."""
MAX_DIRECT_SIZE = 128
"""The size of the largest triangular matrix that is inverted without being split into blocks."""
OUTPUTS_PER_BATCH = 2048
"""Outputs that are rounded together: their weights in a block of inputs fit into a core's cache."""


@torch.no_grad()
def gptq_model(
    model: PreTrainedModel, schemes: Mapping[str, WeightScheme], ids: torch.Tensor, step: Step
) -> dict[str, QuantizedWeight]:
    """Round the layers of `schemes` in place. Return the codes by layer, without those of layers
    that do not fit (see `rounding.fits`). ids: the token ids [N,T] of the text."""
    modules, rounded = quantized_modules(model), dict[str, QuantizedWeight]()

    def weight_of(name: str) -> torch.Tensor:
        return modules[name].get_parameter("weight").detach()

    fitting = {name for name, scheme in schemes.items() if fits(scheme, weight_of(name))}
    forecast = Forecast(sum(rounding_cost(*weight_of(name).shape) for name in fitting))

    def round_readers(names: Sequence[str], x: torch.Tensor) -> None:
        factor = inverse_factor(hessian(x))
        for name in names:
            rounded[name] = gptq_weight(schemes[name], weight_of(name), factor)
            with one_thread():
                set_weight(modules[name], rounded[name].dequantized())
            forecast.add(rounding_cost(*weight_of(name).shape))
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


def rounding_cost(outputs: int, inputs: int) -> float:
    """Return about how many multiplications `inverse_factor` and `gptq_weight` take."""
    return inputs**2 * (inputs / 3 + outputs / 2)


class Forecast:
    """Warns once, early in long work, how many minutes it will take.

    total: the cost of all work, in any unit.
    """

    def __init__(self, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._clock, self._is_shown = total, 0.0, clock, False
        self._start = clock()

    def add(self, cost: float) -> None:
        """Add the cost of finished work, in the unit of `total`; warn after FORECAST_SHARE."""
        self._done += cost
        if self._done < FORECAST_SHARE * self._total or self._is_shown:
            return
        self._is_shown = True
        minutes = (self._clock() - self._start) / 60 * self._total / self._done
        if minutes > FORECAST_MINUTES:
            warnings.warn(
                f"rounding this model by GPTQ will take about {minutes:.0f} minutes here; "
                "--calibrate none is much faster: it rounds to the nearest codes",
                stacklevel=2,
            )


def hessian(x: torch.Tensor) -> torch.Tensor:
    """Return the Hessian [in,in] float32 of rows x [...,in]."""
    rows = x.flatten(0, -2).float()
    return rows.T @ rows


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular U [in,in] such that U^T U is the inverse of the damped Hessian.

    Cholesky of the Hessian with its inputs in reverse order, reversed back, gives an upper
    triangular R such that R R^T is the Hessian. So U is the inverse of R. This costs a third of
    inverting the Hessian itself.
    """
    reversed_hessian, diagonal = hessian.flip(0, 1), hessian.diagonal()
    # The clamp makes the damping positive even if all inputs are 0.
    reversed_hessian.diagonal().add_(
        DAMPING * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny / DAMPING)
    )
    with one_thread():
        return _inverse_upper(torch.linalg.cholesky(reversed_hessian).flip(0, 1))


def _inverse_upper(matrix: torch.Tensor) -> torch.Tensor:
    """Invert an upper triangular matrix [n,n] recursively by halves, mostly by matrix products."""
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
    """Round a weight [out,in] so that the layer's output changes little.

    scheme: one with a block size. factor: `inverse_factor` of the layer's Hessian.
    """
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
    """Round some outputs of a weight. Return their data, scales and zero points."""
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
