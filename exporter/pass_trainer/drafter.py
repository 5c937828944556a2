"""The frozen model with trainable look-ahead rows, and the loss that trains them to draft."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.model.draft_head import DraftHead
from pass_exporter.model.families import attention_masks
from pass_trainer.config import Aim
from pass_trainer.windows import Windows

CHUNK_ELEMENTS = 2**26
"""The rows whose logits are computed together, times the vocabulary: 256 MiB in float32."""
RowLosses = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""(hidden [n,H], corrections [n,r] or None, states [n,H]) -> losses [n]. See `row_states`."""
DISTRIBUTION_SHARE = 0.1
"""Of the loss `distribution` in the aim `acceptance`: the rest has no gradient where draft and
model are far apart."""


class Drafter(torch.nn.Module):
    """The trained parts, in fp32: `embeddings` [L,H], `adapter` and `head`.

    Tokens run through the frozen model first. Then the look-ahead rows run with the adapter, and
    attend to the tokens' KV cache, so that the rows of tokens need no gradient.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        embeddings: torch.Tensor,
        adapter: Adapter | None,
        head: DraftHead | None = None,
        aim: Aim = "distribution",
    ) -> None:
        super().__init__()
        self._aim = aim
        self._base = (base,)  # a tuple, so that torch does not register the base's parameters
        self._vocabulary = int(base.config.vocab_size)
        self.register_parameter("lookahead", torch.nn.Parameter(embeddings.float().clone()))
        self.adapter, self.head = adapter, head

    @property
    def embeddings(self) -> torch.nn.Parameter:
        return self.get_parameter("lookahead")

    def forward(self, tokens: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Return the loss per anchor, averaged over sequences. tokens [B,N] int64.

        With the aim `distribution`, it is KL(model || draft) in nats, plus the cross-entropy of the
        head's logits over the tokens that it can draft. The head reads the true token before the
        draft: a draft after a wrong one is rejected in any case. With `acceptance`, it is mostly
        the probability that the draft is rejected.
        """
        hidden, states, corrections = self.row_states(tokens, windows)
        sequence_indices = windows.rows // windows.position.shape[1]
        weights = 1 / (windows.anchors.clamp(min=1) * len(tokens))
        weights = weights.index_select(0, sequence_indices)
        return sum_over_rows(
            self._row_losses, hidden, corrections, states, weights, self._vocabulary
        )

    def _row_losses(
        self, hidden: torch.Tensor, corrections: torch.Tensor | None, states: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            target = self.logits(states).float().log_softmax(-1)
        logits = self.logits(hidden)
        draft = logits.float().log_softmax(-1)
        loss = torch.nn.functional.kl_div(draft, target, reduction="none", log_target=True).sum(-1)
        if self.head is not None and corrections is not None:
            ids, adjusted = self.head.adjusted(logits, corrections)
            target, draft = target.gather(-1, ids), adjusted.log_softmax(-1)
            loss = loss - (target.exp() * draft).sum(-1)
        if self._aim == "acceptance":
            rejection = 1 - acceptance_probability(target, draft)
            loss = DISTRIBUTION_SHARE * loss + (1 - DISTRIBUTION_SHARE) * rejection
        return loss

    def log_probs(
        self, tokens: torch.Tensor, windows: Windows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of the drafts of `windows.rows`, and of the frozen model at the
        same positions, both [n,V] float32; -inf for tokens that a head cannot draft."""
        hidden, states, corrections = self.row_states(tokens, windows)
        drafts = self.logits(hidden).float()
        if self.head is not None and corrections is not None:
            ids, adjusted = self.head.adjusted(drafts, corrections)
            drafts = torch.full_like(drafts, -torch.inf).scatter(-1, ids, adjusted)
        return drafts.log_softmax(-1), self.logits(states).float().log_softmax(-1)

    def row_states(
        self, tokens: torch.Tensor, windows: Windows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return, for `windows.rows`, the hidden states [n,H] of the look-ahead rows, those of the
        frozen model [n,H] at the same positions, and the head's corrections [n,r] or None."""
        hidden, states = self.hidden_states(tokens, windows)
        position = windows.position.flatten().index_select(0, windows.rows)
        # Indices into the tokens of all sequences, one sequence after the other.
        token_indices = windows.rows // windows.position.shape[1] * tokens.shape[1] + position
        hidden = hidden.flatten(0, 1).index_select(0, windows.rows)
        states = states.flatten(0, 1).index_select(0, token_indices)
        if self.head is None:
            return hidden, states, None
        index = windows.lookahead_index.flatten().index_select(0, windows.rows)
        before = tokens.flatten().index_select(0, token_indices)
        corrections = self.head.corrections(hidden, before, index, len(self.embeddings) - 1)
        return hidden, states, corrections

    def hidden_states(
        self, tokens: torch.Tensor, windows: Windows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of look-ahead rows [B,R,H], and of all tokens [B,N,H]."""
        (base,) = self._base
        with torch.no_grad():
            out = base.model(input_ids=tokens, past_key_values=DynamicCache(), use_cache=True)
        return self._lookahead_states(base, windows, out.past_key_values), out.last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [...,H] to the LM head's logits [...,V]."""
        logits: torch.Tensor = self._base[0].lm_head(hidden)
        return logits

    def _lookahead_states(
        self, base: PreTrainedModel, windows: Windows, cache: DynamicCache
    ) -> torch.Tensor:
        token_count = windows.mask.shape[-1] - windows.mask.shape[-2]
        token_positions = torch.arange(token_count, device=windows.position.device)
        column_positions = torch.cat(
            [token_positions.expand(len(windows.position), -1), windows.position], 1
        )
        with nullcontext() if self.adapter is None else self.adapter.attached(base):
            hidden: torch.Tensor = base.model(
                inputs_embeds=self.embeddings.to(base.dtype)[windows.lookahead_index],
                attention_mask=attention_masks(
                    base.config, windows.mask, windows.position, column_positions
                ),
                position_ids=windows.position,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        return hidden


ADAPTED_LAYERS = ("o_proj", "down_proj")
"""As many parameters on all seven linear layers drafted no better, and added three times as many
nodes."""


def layer_of(name: str) -> int:
    """Return the layer of a name such as `layers.7.mlp.down_proj`."""
    return int(name.split(".")[1])


def new_adapter(
    base: PreTrainedModel, rank: int, generator: torch.Generator, first: int = 0
) -> Adapter:
    """Return a LoRA adapter for the layers from `first` on, with a random A and a B of 0."""
    factors = {}
    for name, layer in linear_layers(base).items():
        if name.rpartition(".")[2] in ADAPTED_LAYERS and layer_of(name) >= first:
            a = torch.randn(rank, layer.in_features, generator=generator) / math.sqrt(
                layer.in_features
            )
            factors[name] = (a, torch.zeros(layer.out_features, rank))
    return Adapter(factors)


def acceptance_probability(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Return the probability [...] that model and draft sample the same token with the same noise.

    target, draft [...,C]: logarithms of the probabilities p and q of the same C tokens. q sums to
    1; p sums to less if the model gives other tokens a probability, too. By the same exponential
    noise, that is

        sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)

    With tokens sorted by falling p / q, the sum over j is A_i / p_i + B_i / q_i: A_i is the sum of
    p up to and including i, B_i the sum of q after i. So a sort replaces C^2 ratios.
    """
    order = (target - draft).detach().argsort(-1, descending=True)
    p, q = target.gather(-1, order).exp(), draft.gather(-1, order).exp()
    # Tokens other than the C have q = 0, so they sort first and are a part of every A_i.
    others = (1 - p.sum(-1, keepdim=True)).clamp(min=0)
    a = p.cumsum(-1) + others
    b = (q.flip(-1).cumsum(-1).flip(-1) - q).clamp(min=0)
    return (p * q / (a * q + b * p + 1e-30)).sum(-1)


def sum_over_rows(
    losses: RowLosses,
    hidden: torch.Tensor,
    corrections: torch.Tensor | None,
    states: torch.Tensor,
    weights: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """Return the sum of `losses` times `weights` [n], with gradients for hidden and corrections.
    Rows are computed in chunks, gradients included: all logits would not fit in memory."""
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
