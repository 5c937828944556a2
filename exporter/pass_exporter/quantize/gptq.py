"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): weights are rounded one input after another, and the inputs to come
make up for what that did to the layer's output.

How much one input can stand in for another is in the layer's Hessian, the sum of x x^T over the rows x that it reads.
Text runs through the model once: a layer is rounded when the text arrives there, so it reads what the rounded layers
before it have made of the text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import linear_layers
from pass_exporter.quantize.grid import Packed, fit, nearest, pack
from pass_exporter.quantize.sites import Site, find_sites
from pass_exporter.quantize.spec import Grid, Kind
from pass_exporter.threads import one_thread

DAMPING = 0.01
"""Of the Hessian's mean diagonal, added to its diagonal."""

OUTPUTS = 2048
"""Outputs that are rounded at once: a block of their inputs stays in a core's cache."""


@torch.no_grad()
def round_while_reading(
    model: PreTrainedModel,
    grids: Callable[[Kind], Grid],
    head: Grid,
    ids: torch.Tensor,
    step: Callable[[int, int], None],
) -> dict[str, Packed]:
    """Rounds the decoder's layers in place, by their names, on the text ids [N,T]; then `lm_head`, as "lm_head".

    grids: of layers by what they read. Layers whose inputs fill no whole blocks are left as they are.
    """
    layers, sites, packed = linear_layers(model), find_sites(model), dict[str, Packed]()

    def round_all(grid: Grid, names: tuple[str, ...], modules: tuple[torch.nn.Module, ...], x: torch.Tensor) -> None:
        if grid.fits(x.shape[-1]):
            factor = inverse_factor(hessian(x))
            for name, module in zip(names, modules, strict=True):
                packed[name] = compensate(grid, module.get_parameter("weight").detach(), factor)
                module.weight = torch.nn.Parameter(packed[name].restored(), requires_grad=False)
        step(len(packed), len(layers) + 1)

    def hook(site: Site) -> Callable[[torch.nn.Module, tuple[torch.Tensor]], None]:
        modules = tuple(layers[name] for name in site.readers)
        return lambda _, inputs: round_all(grids(site.kind), site.readers, modules, inputs[0])

    handles = [layers[site.readers[0]].register_forward_pre_hook(hook(site)) for site in sites]
    try:
        last = model.model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    round_all(head, ("lm_head",), (model.lm_head,), last)
    return packed


def hessian(x: torch.Tensor) -> torch.Tensor:
    """[in,in] float32 of rows x [...,in]."""
    rows = x.flatten(0, -2).float()
    return rows.T @ rows


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """U [in,in], upper triangular, where U^T U is the inverse of the damped Hessian."""
    damped, diagonal = hessian.clone(), hessian.diagonal()
    damped.diagonal().add_(DAMPING * diagonal.mean().clamp(min=torch.finfo(torch.float32).tiny / DAMPING))
    factor: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return factor


def compensate(grid: Grid, weight: torch.Tensor, factor: torch.Tensor) -> Packed:
    """`round_to` for the output of a layer in place of its weight [out,in]. grid: has blocks; factor: see above."""
    with one_thread():
        parts = [_compensate(grid, rows, factor) for rows in torch.split(weight, OUTPUTS)]
    data, scales, zero_points = (torch.cat([part[i] for part in parts]) for i in range(3))
    return Packed(grid, data, scales, zero_points if grid.zero_points else None)


def _compensate(
    grid: Grid, weight: torch.Tensor, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Data, scales and zero points of some outputs."""
    assert grid.block is not None
    rest = weight.float().T.contiguous()  # [in,out]; the outputs of an input lie together
    numbers, diagonal = torch.empty_like(rest), factor.diagonal()
    scales, zeros = (torch.empty(len(rest) // grid.block, rest.shape[1]) for _ in range(2))
    for index, start in enumerate(range(0, len(rest), grid.block)):
        stop = start + grid.block
        block = rest[start:stop]
        scale, zero = fit(grid, block.T, weight.dtype, diagonal[start:stop] ** -2)
        scale, zero = scales[index], zeros[index] = scale[:, 0], zero[:, 0]
        errors = torch.empty_like(block)
        for i in range(grid.block):
            row = start + i
            numbers[row] = nearest(grid, block[i], scale, zero)
            errors[i] = (block[i] - (numbers[row] - zero) * scale) / diagonal[row]
            block[i + 1 :].addr_(factor[row, row + 1 : stop], errors[i], alpha=-1)
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return pack(grid, numbers.T.contiguous()), scales.T.to(weight.dtype), zeros.T.to(torch.uint8)
