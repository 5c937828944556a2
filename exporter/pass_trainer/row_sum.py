"""Sums a loss over rows, in chunks, because logits of all rows at once would not fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHUNK_ELEMENTS = 2**26
"""The rows of a chunk times the vocabulary size. A tensor of so many float32 takes 256 MiB."""
RowLosses = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""(hidden [n,H], corrections [n,r] or None, states [n,H]) -> losses [n]. See `row_states`."""


def sum_over_rows(
    losses: RowLosses,
    hidden: torch.Tensor,
    corrections: torch.Tensor | None,
    states: torch.Tensor,
    weights: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """Return the sum of `losses` times `weights` [n], with gradients for hidden and corrections.

    A chunk's gradients are computed together with its losses. So no logits are kept for the
    backward pass, and none are computed twice.
    """
    rows = max(CHUNK_ELEMENTS // vocabulary, 1)
    total: torch.Tensor = _RowSum.apply(losses, rows, hidden, corrections, states, weights)  # type: ignore[no-untyped-call]
    return total


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        losses: RowLosses,
        rows: int,
        hidden: torch.Tensor,
        corrections: torch.Tensor | None,
        states: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        trained = [tensor for tensor in (hidden, corrections) if tensor is not None]
        gradients = [torch.empty_like(tensor) for tensor in trained]
        total = weights.new_zeros(())
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            inputs = [tensor[part].detach().requires_grad_() for tensor in trained]
            with torch.enable_grad():
                loss = (
                    losses(inputs[0], inputs[1] if len(inputs) > 1 else None, states[part])
                    * weights[part]
                ).sum()
            for gradient, values in zip(gradients, torch.autograd.grad(loss, inputs), strict=True):
                gradient[part] = values
            total += loss.detach()
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *total_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, *corrections = (total_gradient[0] * gradient for gradient in ctx.saved_tensors)
        return None, None, hidden, corrections[0] if corrections else None, None, None
