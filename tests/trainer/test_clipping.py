"""Gradients of all groups are clipped at once, each group to its own norm."""

from __future__ import annotations

import torch

from pass_trainer.trainer import clip_gradients


def test_each_group_is_clipped_to_a_norm_of_its_own():
    random = torch.Generator().manual_seed(0)
    groups = []
    for scale, shapes in ((5.0, [(3, 4)]), (0.01, [(2,), (4, 2)]), (2.0, [(6,), (2, 2), (3,)])):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = scale * torch.randn(parameter.shape, generator=random)
        groups.append({"params": parameters})
    before = [[p.grad.clone() for p in group["params"]] for group in groups]
    clip_gradients(groups)
    for group, given in zip(groups, before, strict=True):
        expected = [torch.nn.Parameter(torch.zeros_like(each)) for each in given]
        for parameter, gradient in zip(expected, given, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(expected, 1.0)
        for parameter, reference in zip(group["params"], expected, strict=True):
            torch.testing.assert_close(parameter.grad, reference.grad)
