"""Gradients of all groups of parameters are clipped at once, each group to its own norm."""

from __future__ import annotations

import torch

from pass_trainer.trainer import clip_gradients


def test_the_gradients_of_each_group_are_scaled_to_a_norm_of_at_most_1():
    random = torch.Generator().manual_seed(0)
    groups = []
    # The gradients of the second group have a norm below 1, so they must stay as they are.
    for scale, shapes in ((5.0, [(3, 4)]), (0.01, [(2,), (4, 2)]), (2.0, [(6,), (2, 2), (3,)])):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = scale * torch.randn(parameter.shape, generator=random)
        groups.append({"params": parameters})
    before = [[parameter.grad.clone() for parameter in group["params"]] for group in groups]
    clip_gradients(groups)
    for group, gradients in zip(groups, before, strict=True):
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient / norm.clamp(min=1))
