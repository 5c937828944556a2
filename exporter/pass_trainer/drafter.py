"""The frozen model with trainable look-ahead rows, and the loss that trains them to draft."""

from __future__ import annotations

import math
from typing import Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.model.head import DraftHead
from pass_exporter.model.sliding import attention_masks
from pass_trainer.acceptance import agreement
from pass_trainer.windows import Windows

Aim = Literal["distribution", "acceptance"]
DISTRIBUTION_SHARE = 0.1
"""The weight of the distance of distributions in the loss with the aim `acceptance`. If a draft is far off, the
gradient of the probability of acceptance vanishes; that of the distance does not."""


class Drafter(torch.nn.Module):
    """The trained parts, in fp32: `lookahead` [L,H], `adapter` and `head`. The base model's weights are no parameters.

    The tokens run through the frozen model first. Then the look-ahead rows run with the adapter attached, and attend to
    the tokens' KV cache. So the adapter cannot change token rows, and these need no gradient.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        lookahead: torch.Tensor,
        adapter: Adapter | None,
        head: DraftHead | None = None,
        aim: Aim = "distribution",
    ) -> None:
        super().__init__()
        self._aim = aim
        self._base = (base,)  # a tuple, so that torch does not register its parameters
        self.lookahead = torch.nn.Parameter(lookahead.float().clone())
        self.adapter, self.head = adapter, head

    def forward(self, tokens: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Return the loss in nats per anchor, averaged over sequences. tokens [B,N].

        A row's loss with the aim `distribution` is KL(model || draft). If there is a head, the cross-entropy of its
        logits is added. The head reads the true previous token, because a draft after a wrong draft is rejected in any
        case. With the aim `acceptance`, this loss has the weight DISTRIBUTION_SHARE, and the probability that the draft
        is rejected has the remaining weight.
        """
        hidden, drafts, targets = self.rows(tokens, windows)
        target = targets.float().log_softmax(-1)
        loss = torch.nn.functional.kl_div(
            drafts.float().log_softmax(-1), target, reduction="none", log_target=True
        ).sum(-1)
        if self.head is not None:
            ids, adjusted = self.head(hidden, drafts, tokens.gather(1, windows.depth), windows.index)
            of_candidates, log_drafts = target.gather(-1, ids), adjusted.log_softmax(-1)
            loss = loss - (of_candidates.exp() * log_drafts).sum(-1)
        else:
            of_candidates, log_drafts = target, drafts.float().log_softmax(-1)
        if self._aim == "acceptance":
            rejected = 1 - agreement(of_candidates, log_drafts)
            loss = DISTRIBUTION_SHARE * loss + (1 - DISTRIBUTION_SHARE) * rejected
        valid = windows.valid
        anchors = ((windows.index == 0) & valid).sum(-1).clamp(min=1)
        return ((loss * valid).sum(-1) / anchors).mean()

    def log_probs(self, tokens: torch.Tensor, windows: Windows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities of the drafts and of the frozen model for the same tokens, both [B,R,V] float32.

        If there is a head, it reads the true previous tokens.
        """
        hidden, drafts, targets = self.rows(tokens, windows)
        drafts = drafts.float()
        if self.head is not None:
            ids, adjusted = self.head(hidden, drafts, tokens.gather(1, windows.depth), windows.index)
            drafts = torch.full_like(drafts, -torch.inf).scatter(-1, ids, adjusted)
        return drafts.log_softmax(-1), targets.float().log_softmax(-1)

    def rows(self, tokens: torch.Tensor, windows: Windows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return hidden states [B,R,H] and logits [B,R,V] of look-ahead rows, and the frozen model's logits [B,R,V].

        The look-ahead rows' logits do not include the head. The frozen model's logits are for the same tokens.
        """
        (base,) = self._base
        hidden, states = self.states(tokens, windows)
        drafts = base.lm_head(hidden)
        with torch.no_grad():
            places = windows.depth[..., None].expand(-1, -1, states.shape[-1])
            targets = base.lm_head(states.gather(1, places))
        return hidden, drafts, targets

    def states(self, tokens: torch.Tensor, windows: Windows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states of the look-ahead rows [B,R,H], and of the frozen model for all tokens [B,N,H]."""
        (base,) = self._base
        with torch.no_grad():
            out = base.model(input_ids=tokens, past_key_values=DynamicCache(), use_cache=True)
        return self._draft(base, windows, out.past_key_values), out.last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [...,H] of look-ahead rows to their logits [...,V] without the head."""
        (base,) = self._base
        logits: torch.Tensor = base.lm_head(hidden)
        return logits

    def _draft(self, base: PreTrainedModel, windows: Windows, cache: DynamicCache) -> torch.Tensor:
        """Return the hidden states [B,R,H] of the look-ahead rows."""
        tokens = torch.arange(windows.mask.shape[-1] - windows.mask.shape[-2], device=windows.depth.device)
        columns = torch.cat([tokens.expand(len(windows.depth), -1), windows.depth], 1)

        def run() -> torch.Tensor:
            hidden: torch.Tensor = base.model(
                inputs_embeds=self.lookahead.to(base.dtype)[windows.index],
                attention_mask=attention_masks(base.config, windows.mask, windows.depth, columns),
                position_ids=windows.depth,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            return hidden

        if self.adapter is None:
            return run()
        with self.adapter.attached(base):
            return run()


ADAPTED_LAYERS = ("o_proj", "down_proj")
"""Linear layers that get an adapter: those whose outputs are added to the residual stream. With equally many
parameters, drafts were as good as with adapters on all seven linear layers of a Llama layer, and the trunk had a third
of the extra nodes."""


def layer_of(name: str) -> int:
    """Return the index of the decoder layer: `layers.7.mlp.down_proj` -> 7."""
    return int(name.split(".")[1])


def new_adapter(base: PreTrainedModel, rank: int, generator: torch.Generator, first: int = 0) -> Adapter:
    """Return a new LoRA adapter: A is random and B is zero, so that it changes nothing yet. first: the first adapted
    layer."""
    factors = {}
    for name, layer in linear_layers(base).items():
        if name.rpartition(".")[2] in ADAPTED_LAYERS and layer_of(name) >= first:
            a = torch.randn(rank, layer.in_features, generator=generator) / math.sqrt(layer.in_features)
            factors[name] = (a, torch.zeros(layer.out_features, rank))
    return Adapter(factors)
