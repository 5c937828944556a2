"""Computes the probability that a draft is accepted, as a part of the loss.

Gradients flow to the model's and to the draft's distribution.
"""

from __future__ import annotations

import torch

MIN_DENOMINATOR = 1e-30
"""Is added to denominators, which are 0 where p and q are 0."""


def acceptance_probability(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Return the probability [...] that model and draft sample the same token with the same noise.

    target, draft [...,C]: logarithms of the probabilities p and q of the same C tokens. q sums to
    1; p sums to less if the model gives other tokens a probability, too.

    The exact-match rule samples both with the same exponential noise E: the model's token is the i
    with the least E_i / p_i, the draft the i with the least E_i / q_i (equivalent to Gumbel noise
    added to log-probabilities). Both choose token i if E_j >= E_i max(p_j / p_i, q_j / q_i) for
    every other token j. Given E_i, this has the probability exp(-E_i S), with S the sum of these
    maxima over the other tokens. The mean over E_i is 1 / (1 + S), so

        P(same token) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)

    p_j / p_i is the larger ratio if p_j / q_j > p_i / q_i. With the tokens sorted by falling p / q,
    the sum over j is therefore A_i / p_i + B_i / q_i: A_i is the sum of p up to and including i,
    and B_i the sum of q after i. So a sort replaces C^2 ratios. The result is between (1 - d) / (1
    + d) and 1 - d, where d is the total variation distance of p and q.
    """
    order = (target - draft).detach().argsort(-1, descending=True)
    p, q = target.gather(-1, order).exp(), draft.gather(-1, order).exp()
    # Tokens other than the C have q = 0, so they sort first and are a part of every A_i.
    others = (1 - p.sum(-1, keepdim=True)).clamp(min=0)
    a = p.cumsum(-1) + others
    b = (q.flip(-1).cumsum(-1).flip(-1) - q).clamp(min=0)
    return (p * q / (a * q + b * p + MIN_DENOMINATOR)).sum(-1)
