"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): weights are rounded one input after another, and the weights of later
inputs are changed so that they make up for what the rounding did to the layer's output.

A layer's Hessian, the sum of x x^T over the rows x that it reads, gives how much one input can stand in for another.
Text runs through the model once. A layer is rounded when the text reaches it, so that its rows come from the rounded
layers before it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import linear_layers
from pass_exporter.progress import Step
from pass_exporter.quantize.points import QuantPoint, find_points
from pass_exporter.quantize.rounding import QuantizedWeight, choose_scales, nearest, pack
from pass_exporter.quantize.spec import QuantSpec, WeightScheme
from pass_exporter.threads import one_thread

DAMPING = 0.01
"""This share of the mean of the Hessian's diagonal is added to the diagonal."""

LONG_MINUTES, SHOWN = 30, 0.02
"""A forecast of more minutes is shown, when this share of the work is done."""

SMALL = 128
"""The largest triangular matrix that is inverted as a whole."""

OUTPUTS = 2048
"""Outputs that are rounded at a time, so that a block of their inputs stays in a core's cache."""


@torch.no_grad()
def gptq_model(model: PreTrainedModel, spec: QuantSpec, ids: torch.Tensor, step: Step) -> dict[str, QuantizedWeight]:
    """Rounds the decoder's layers in place, by their names, on the text ids [N,T]; then `lm_head`, as "lm_head".

    Layers whose inputs fill no whole blocks are left as they are.
    """
    layers, points, found = linear_layers(model), find_points(model), dict[str, QuantizedWeight]()
    assert spec.scheme is not None and spec.lm_head is not None
    others, attention_in = spec.scheme, spec.attention_in or spec.scheme
    forecast = Forecast(sum(rounding_cost(*layer.weight.shape) for layer in (*layers.values(), model.lm_head)))

    def round_readers(scheme: WeightScheme, names: Sequence[str], x: torch.Tensor) -> None:
        if scheme.fits(x.shape[-1]):
            factor = inverse_factor(hessian(x))
            for name in names:
                module = model.lm_head if name == "lm_head" else layers[name]
                found[name] = gptq_weight(scheme, module.get_parameter("weight").detach(), factor)
                with one_thread():
                    module.weight = torch.nn.Parameter(found[name].restored(), requires_grad=False)
                forecast.add(rounding_cost(*module.weight.shape))
        step(len(found), len(layers) + 1)

    def round_at(point: QuantPoint, x: torch.Tensor) -> None:
        round_readers(attention_in if point.kind == "attention_in" else others, point.readers, x)

    handles = [
        layers[point.readers[0]].register_forward_pre_hook(lambda _, inputs, point=point: round_at(point, inputs[0]))
        for point in points
    ]
    try:
        last = model.model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    round_readers(spec.lm_head, ("lm_head",), last)
    return found


def rounding_cost(outputs: int, inputs: int) -> float:
    """Multiplications, nearly: the factor of a Hessian, and what each input's rounding changes in the later ones."""
    return inputs**2 * (inputs / 3 + outputs / 2)


class Forecast:
    """Warns once, after the first parts of long work, of how long all of it will take. total: its cost in any unit."""

    def __init__(self, total: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._clock, self._is_shown = total, 0.0, clock, False
        self._begun = clock()

    def add(self, cost: float) -> None:
        """Count work that was done since the last call, or since the beginning."""
        self._done += cost
        minutes = (self._clock() - self._begun) / 60 * self._total / self._done
        if self._done < SHOWN * self._total or self._is_shown:
            return
        self._is_shown = True
        if minutes > LONG_MINUTES:
            warnings.warn(
                f"rounding this model by GPTQ will take about {minutes:.0f} minutes here; --calibrate none rounds to "
                "the nearest instead, in a small part of that time",
                stacklevel=2,
            )


def hessian(x: torch.Tensor) -> torch.Tensor:
    """[in,in] float32 of rows x [...,in]."""
    rows = x.flatten(0, -2).float()
    return rows.T @ rows


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """U [in,in], upper triangular, where U^T U is the inverse of the damped Hessian.

    With the order of the inputs turned round, the Hessian's Cholesky factor is an upper triangular R with R R^T for the
    Hessian, so U is the inverse of R: the Hessian's own inverse, which costs three times as much, is not needed.
    """
    damped, diagonal = hessian.flip(0, 1), hessian.diagonal()
    damped.diagonal().add_(DAMPING * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny / DAMPING))
    with one_thread():
        return _inverse_upper(torch.linalg.cholesky(damped).flip(0, 1))


def _inverse_upper(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of an upper triangular matrix [n,n], by halves, so that most of the work is matrix products."""
    size = len(matrix)
    inverse = torch.zeros_like(matrix)
    if size <= SMALL:
        return inverse.copy_(torch.linalg.solve_triangular(matrix, torch.eye(size), upper=True))
    half = size // 2
    first, last = inverse[:half, :half], inverse[half:, half:]
    first.copy_(_inverse_upper(matrix[:half, :half]))
    last.copy_(_inverse_upper(matrix[half:, half:]))
    torch.mm(first @ matrix[:half, half:], last, out=inverse[:half, half:]).neg_()
    return inverse


def gptq_weight(scheme: WeightScheme, weight: torch.Tensor, factor: torch.Tensor) -> QuantizedWeight:
    """Round a weight [out,in] so that the layer's output changes little.

    scheme: has blocks. factor: `inverse_factor` of the layer's Hessian.
    """
    with one_thread():
        parts = [_gptq_outputs(scheme, outputs, factor) for outputs in torch.split(weight, OUTPUTS)]
    data, scales, zero_points = (torch.cat([part[i] for part in parts]) for i in range(3))
    return QuantizedWeight(scheme, data, scales, zero_points if scheme.zero_points else None)


def _gptq_outputs(
    scheme: WeightScheme, weight: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data, scales and zero points of some outputs."""
    size = scheme.block_size
    assert size is not None
    rest = weight.float().T.contiguous()  # [in,out], where the outputs of an input lie side by side
    codes, diagonal = torch.empty_like(rest), factor.diagonal()
    scales, zeros = (torch.empty(len(rest) // size, rest.shape[1]) for _ in range(2))
    for index, start in enumerate(range(0, len(rest), size)):
        stop = start + size
        block = rest[start:stop]
        scale, zero = choose_scales(scheme, block.T, weight.dtype, diagonal[start:stop] ** -2)
        scale, zero = scales[index], zeros[index] = scale[:, 0], zero[:, 0]
        errors = torch.empty_like(block)
        for i in range(size):
            row = start + i
            codes[row] = nearest(scheme, block[i], scale, zero)
            errors[i] = (block[i] - (codes[row] - zero) * scale) / diagonal[row]
            block[i + 1 :].addr_(factor[row, row + 1 : stop], errors[i], alpha=-1)
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return pack(scheme, codes.T.contiguous()), scales.T.to(weight.dtype), zeros.T.to(torch.uint8)
