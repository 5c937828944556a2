"""The frozen model with trainable look-ahead rows, and the loss that trains them to draft."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from transformers import DynamicCache, PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.model.head import DraftHead
from pass_exporter.model.sliding import attention_masks
from pass_trainer.acceptance import acceptance_probability
from pass_trainer.config import Aim
from pass_trainer.row_sum import sum_over_rows
from pass_trainer.windows import Windows

SWITCH_SHARE = 0.7
"""The aim `both` is `distribution` for this share of a run, and then `acceptance`."""
DISTRIBUTION_SHARE = 0.1
"""The weight of the loss `distribution` in the loss `acceptance`. If a draft's distribution is far
from the model's, the gradient of the rest of the loss vanishes."""


class Drafter(torch.nn.Module):
    """The trained parts, in fp32: `embeddings` [L,H], `adapter` and `head`.

    The weights of the frozen model, `base`, are not parameters. The tokens run through the frozen
    model first. Then the look-ahead rows run with the adapter attached, and attend to the tokens'
    KV cache. So the adapter cannot change the rows of tokens, and these need no gradient.
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
        self.set_aim(aim, 0.0)
        self._base = (base,)  # a tuple, so that torch does not register the base's parameters
        self._vocabulary = int(base.config.vocab_size)
        self.register_parameter("lookahead", torch.nn.Parameter(embeddings.float().clone()))
        self.adapter, self.head = adapter, head

    @property
    def embeddings(self) -> torch.nn.Parameter:
        """The look-ahead embeddings [L,H], which are named `lookahead` in checkpoints."""
        return self.get_parameter("lookahead")

    def set_aim(self, aim: Aim, share: float) -> None:
        """Choose the loss by `aim` for a step at which `share` (0 to 1) of the run is done."""
        self._for_acceptance = aim == "acceptance" or (aim == "both" and share >= SWITCH_SHARE)

    def forward(self, tokens: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Return the loss per anchor, averaged over sequences. tokens [B,N] int64.

        With the aim `distribution`, a row's loss is KL(model || draft) in nats. If there is a head,
        the cross-entropy of the head's logits is added, over the candidate tokens, which are those
        that the head can draft. The head reads the true token before the draft, because a draft
        after a wrong one is rejected in any case. With the aim `acceptance`, this loss has the
        weight DISTRIBUTION_SHARE, and the probability that the draft is rejected has the rest.
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
        """Return the losses [n] of n rows. Arguments: what `row_states` returns for the rows."""
        with torch.no_grad():
            target = self.logits(states).float().log_softmax(-1)
        logits = self.logits(hidden)
        draft = logits.float().log_softmax(-1)
        loss = torch.nn.functional.kl_div(draft, target, reduction="none", log_target=True).sum(-1)
        if self.head is not None and corrections is not None:
            ids, adjusted = self.head.adjusted(logits, corrections)
            target, draft = target.gather(-1, ids), adjusted.log_softmax(-1)
            loss = loss - (target.exp() * draft).sum(-1)
        if self._for_acceptance:
            rejection = 1 - acceptance_probability(target, draft)
            loss = DISTRIBUTION_SHARE * loss + (1 - DISTRIBUTION_SHARE) * rejection
        return loss

    def log_probs(
        self, tokens: torch.Tensor, windows: Windows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of the drafts of `windows.rows`, and those of the frozen
        model at the same positions, both [n,V] float32.

        If there is a head, it reads the true token before each draft, and tokens that are no
        candidates have -inf.
        """
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
        frozen model [n,H] at the same positions, and the head's corrections [n,r], None without a
        head. Logits are computed from these."""
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
        """Return the hidden states of look-ahead rows [B,R,H], and of all tokens [B,N,H]."""
        (base,) = self._base
        with torch.no_grad():
            out = base.model(input_ids=tokens, past_key_values=DynamicCache(), use_cache=True)
        return self._lookahead_states(base, windows, out.past_key_values), out.last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [...,H] to logits [...,V] by the LM head, without the draft head."""
        logits: torch.Tensor = self._base[0].lm_head(hidden)
        return logits

    def _lookahead_states(
        self, base: PreTrainedModel, windows: Windows, cache: DynamicCache
    ) -> torch.Tensor:
        """Return the hidden states [B,R,H] of the look-ahead rows."""
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
"""The linear layers that get an adapter: their outputs are added to the residual stream. Adapters
with as many parameters on all seven linear layers of a Llama layer drafted no better, and added
three times as many nodes to the trunk."""


def layer_of(name: str) -> int:
    """Return the decoder layer's index from a name such as `layers.7.mlp.down_proj`: 7."""
    return int(name.split(".")[1])


def new_adapter(
    base: PreTrainedModel, rank: int, generator: torch.Generator, first: int = 0
) -> Adapter:
    """Return a new LoRA adapter for the layers from `first` on, with a random A and a B of 0."""
    factors = {}
    for name, layer in linear_layers(base).items():
        if name.rpartition(".")[2] in ADAPTED_LAYERS and layer_of(name) >= first:
            a = torch.randn(rank, layer.in_features, generator=generator) / math.sqrt(
                layer.in_features
            )
            factors[name] = (a, torch.zeros(layer.out_features, rank))
    return Adapter(factors)
