"""How often a draft is accepted, as a function of both distributions that gradients pass through."""

from __future__ import annotations

import torch

TINY = 1e-30


def agreement(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Return the probability that model and draft choose the same token with the same noise: [...].

    target, draft [...,C]: log-probabilities of the same C tokens. `draft` has no others; `target` may have.

    With the exact-match rule both choices are races with the same exponential noise E: the model takes the token with
    the least E_i / p_i, the draft that with the least E_i / q_i (which is Gumbel noise added to log-probabilities, put
    differently). Token i wins both where E_j >= E_i max(p_j / p_i, q_j / q_i) for every other j. Given E_i that has the
    probability exp(-E_i S), S the sum of these maxima over the other tokens; its mean over E_i is 1 / (1 + S), so

        P(both win) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)

    Of the two ratios the first is the larger where p_j / q_j > p_i / q_i. In the order of p / q the sum over j is
    therefore A_i / p_i + B_i / q_i, where A_i is p's mass of i and the tokens before it and B_i q's mass of those after
    it: a sort in place of C^2 ratios. The result lies between (1 - d) / (1 + d) and 1 - d, d the total variation.
    """
    order = (target - draft).detach().argsort(-1, descending=True)
    p, q = target.gather(-1, order).exp(), draft.gather(-1, order).exp()
    others = (1 - p.sum(-1, keepdim=True)).clamp(min=0)  # tokens that cannot be drafted come before all: q is 0
    before = p.cumsum(-1) + others
    after = q.flip(-1).cumsum(-1).flip(-1) - q
    return (p * q / (before * q + after.clamp(min=0) * p + TINY)).sum(-1)
