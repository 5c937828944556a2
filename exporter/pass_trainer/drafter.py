"""The frozen model with trainable look-ahead rows, and the loss that teaches them to draft."""

from __future__ import annotations

import math

import torch
from transformers import DynamicCache, PreTrainedModel

from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.model.head import DraftHead
from pass_trainer.windows import Windows


class Drafter(torch.nn.Module):
    """Holds what is trained, in fp32: `lookahead` [L,H], `adapter`, `head`. The base model is none of its parameters.

    Tokens pass through the frozen model alone; look-ahead rows then attend to the cache that the tokens left, with
    the adapter attached. So token rows cannot see the adapter, and need no gradient.
    """

    def __init__(
        self, base: PreTrainedModel, lookahead: torch.Tensor, adapter: Adapter | None, head: DraftHead | None = None
    ) -> None:
        super().__init__()
        self._base = (base,)  # a tuple, so that torch does not register it
        self.lookahead = torch.nn.Parameter(lookahead.float().clone())
        self.adapter, self.head = adapter, head

    def forward(self, tokens: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Mean over sequences of the rows' losses, in nats by anchor. tokens [B,N].

        A row's loss is KL(model || draft), and with a head its cross-entropy besides: the head is told the token that
        truly stands before, since drafts behind a wrong one are lost whatever they are.
        """
        hidden, drafts, targets = self.rows(tokens, windows)
        target = targets.float().log_softmax(-1)
        loss = torch.nn.functional.kl_div(
            drafts.float().log_softmax(-1), target, reduction="none", log_target=True
        ).sum(-1)
        if self.head is not None:
            ids, adjusted = self.head(hidden, drafts, tokens.gather(1, windows.depth), windows.index)
            loss = loss - (target.gather(-1, ids).exp() * adjusted.log_softmax(-1)).sum(-1)
        valid = windows.valid
        anchors = ((windows.index == 0) & valid).sum(-1).clamp(min=1)
        return ((loss * valid).sum(-1) / anchors).mean()

    def log_probs(self, tokens: torch.Tensor, windows: Windows) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the drafts, told the tokens before where there is a head, and of the frozen model at the same places: both
        [B,R,V] float32."""
        hidden, drafts, targets = self.rows(tokens, windows)
        drafts = drafts.float()
        if self.head is not None:
            ids, adjusted = self.head(hidden, drafts, tokens.gather(1, windows.depth), windows.index)
            drafts = torch.full_like(drafts, -torch.inf).scatter(-1, ids, adjusted)
        return drafts.log_softmax(-1), targets.float().log_softmax(-1)

    def rows(self, tokens: torch.Tensor, windows: Windows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the look-ahead rows: hidden states [B,R,H] and logits [B,R,V], without the head; and the frozen model's
        logits at the same places [B,R,V]."""
        (base,) = self._base
        hidden, drafts, states = self.drafts(tokens, windows)
        with torch.no_grad():
            places = windows.depth[..., None].expand(-1, -1, states.shape[-1])
            targets = base.lm_head(states.gather(1, places))
        return hidden, drafts, targets

    def drafts(self, tokens: torch.Tensor, windows: Windows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the look-ahead rows as in `rows`, and the frozen model's hidden states of all tokens [B,N,H]."""
        (base,) = self._base
        with torch.no_grad():
            out = base.model(input_ids=tokens, past_key_values=DynamicCache(), use_cache=True)
        hidden = self._draft(base, windows, out.past_key_values)
        return hidden, base.lm_head(hidden), out.last_hidden_state

    def _draft(self, base: PreTrainedModel, windows: Windows, cache: DynamicCache) -> torch.Tensor:
        """Hidden states [B,R,H] of the look-ahead rows."""

        def run() -> torch.Tensor:
            hidden: torch.Tensor = base.model(
                inputs_embeds=self.lookahead.to(base.dtype)[windows.index],
                attention_mask=windows.mask,
                position_ids=windows.depth,
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            return hidden

        if self.adapter is None:
            return run()
        with self.adapter.attached(base):
            return run()


ADAPTED = ("o_proj", "down_proj")
"""The layers that write to the residual stream. At equal size they drafted as well as all seven of a Llama layer,
and cost the trunk a third of the extra nodes."""


def layer_of(name: str) -> int:
    """`layers.7.mlp.down_proj` -> 7"""
    return int(name.split(".")[1])


def new_adapter(base: PreTrainedModel, rank: int, generator: torch.Generator, first: int = 0) -> Adapter:
    """LoRA's start: A random, B zero, so that training begins at the frozen model. first: the first layer with one."""
    factors = {}
    for name, layer in linear_layers(base).items():
        if name.rpartition(".")[2] in ADAPTED and layer_of(name) >= first:
            a = torch.randn(rank, layer.in_features, generator=generator) / math.sqrt(layer.in_features)
            factors[name] = (a, torch.zeros(layer.out_features, rank))
    return Adapter(factors)
