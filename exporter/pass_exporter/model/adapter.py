"""Low-rank adapters (LoRA, arXiv 2106.09685) of look-ahead rows: y = W x + B A x, with A [rank,in]
and B [out,rank]. Other rows keep their bits, so decoding stays lossless (gated LoRA, arXiv
2507.11851)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

ADAPTER_PREFIX = "adapter."


def linear_layers(model: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Return the linear layers of the decoder (`model.model`) by name, in the model's order."""
    modules = model.model.named_modules()
    return {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}


class Adapter(torch.nn.Module):
    """factors: A and B by the layer's name in the decoder, such as `layers.0.mlp.down_proj`. A
    layer's index is its place in `names`."""

    def __init__(self, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.names = tuple(factors)
        self.lora_A = torch.nn.ParameterList(a for a, _ in factors.values())
        self.lora_B = torch.nn.ParameterList(b for _, b in factors.values())

    @property
    def rank(self) -> int:
        return int(self.lora_A[0].shape[0])

    def subset(self, indices: Sequence[int]) -> Adapter:
        return Adapter(
            {self.names[i]: (self.lora_A[i].detach(), self.lora_B[i].detach()) for i in indices}
        )

    def delta(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return B A x [...,out] for the input x [...,in] of the layer `names[index]`."""
        a, b = self.lora_A[index].to(x.dtype), self.lora_B[index].to(x.dtype)
        delta: torch.Tensor = (x @ a.T) @ b.T
        return delta

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the matrices by their names in a weights file (`model.lookahead`)."""
        layers = zip(self.names, self.lora_A, self.lora_B, strict=True)
        return {
            f"{ADAPTER_PREFIX}{name}.{part}": tensor.detach()
            for name, a, b in layers
            for part, tensor in (("lora_A", a), ("lora_B", b))
        }

    @contextmanager
    def attached(
        self,
        model: PreTrainedModel,
        combine: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Adapt the decoder's layers within the block. combine: computes a layer's output from y, x
        and its index; None adds `delta` to all rows."""

        def adapt(index: int) -> Callable[..., torch.Tensor]:
            def hook(
                _: torch.nn.Module, inputs: tuple[torch.Tensor], y: torch.Tensor
            ) -> torch.Tensor:
                (x,) = inputs
                return y + self.delta(index, x) if combine is None else combine(y, x, index)

            return hook

        modules = linear_layers(model)
        handles = [
            modules[name].register_forward_hook(adapt(i)) for i, name in enumerate(self.names)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def truncated(adapter: Adapter, rank: int) -> Adapter:
    """Return the closest adapter with at most `rank`, by a truncated SVD of every B A."""
    if rank >= adapter.rank:
        return adapter
    factors = {}
    for name, a, b in zip(adapter.names, adapter.lora_A, adapter.lora_B, strict=True):
        # B A = Q_b (R_b R_a') Q_a', so an SVD of the small product in brackets is enough.
        (q_b, r_b), (q_a, r_a) = torch.linalg.qr(b.detach()), torch.linalg.qr(a.detach().T)
        u, singular_values, v_transposed = torch.linalg.svd(r_b @ r_a.T)
        # A and B each get the square root of every singular value.
        roots = singular_values[:rank].sqrt()
        factors[name] = (
            (q_a @ v_transposed[:rank].T * roots).T.contiguous(),
            (q_b @ u[:, :rank] * roots).contiguous(),
        )
    return Adapter(factors)
