"""Chooses the static scale of every quantization point by the loss that rounding causes on a text.

The loss is estimated. If rounding changes a tensor by d, the mean log-likelihood of a token falls
by about the mean over rows of sum(g^2 d^2) / 2, where g is the log-likelihood's gradient at the
tensor (the diagonal of the empirical Fisher information). One forward and one backward pass give g
at every point, from which the loss with any scale follows, and g at the outputs of the layers, from
which the loss from rounding weights follows. In one measurement the losses of SmolLM2's points with
static scales added up to 0.029 nats per token; the real loss was 0.044 on Wikipedia and 0.028 on
code. On the text that gave the channel maxima the estimate is half of that: another text is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import linear_layers
from pass_exporter.progress import Step
from pass_exporter.quantize.bf16 import bf16_autocast
from pass_exporter.quantize.points import QuantPoint
from pass_exporter.quantize.rounding import CHUNK_ELEMENTS, round_to
from pass_exporter.quantize.spec import MAX_SIGNED_CODE, WeightScheme

MAX_CODE = MAX_SIGNED_CODE["int8"]
CLIPS = (4.0, 3.0, 2.5, 2.0, 1.6, 1.3, 1.1, 1.0, 0.9, 0.8, 0.65, 0.5, 0.35)
"""Factors to try on the scale that just covers `channel_maxima`. Values that it does not cover are
clipped. Some factors exceed 1, because an MLP may output values ten times as large as any in the
thousands of tokens that gave the maxima."""
BATCH_TOKENS = 512
"""Tokens per pass. This bounds the memory of the activations that the backward pass needs."""
LOSS_SCALE = 256.0
"""The log-likelihood is multiplied by this, so that small gradients do not vanish in float16."""

Watch = Callable[[QuantPoint, int, torch.Tensor], torch.Tensor | None]
"""(point, index of one of its readers, the reader's input) -> the input to use instead, or None."""


@dataclass(frozen=True)
class StaticScale:
    """A point's static scale.

    scale: the activation that the int8 code 1 stands for.
    loss: the estimated loss, in nats per token, from rounding the tensor and its readers' weights.
    """

    scale: float
    loss: float


def activation_codes(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the int8 codes, in the dtype of x, that QuantizeLinear gives with zero point 0."""
    return (x / scale).round_().clamp_(-MAX_CODE - 1, MAX_CODE)


def round_activations(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x rounded to the values of int8 codes."""
    return activation_codes(x, scale).mul_(scale)


@torch.no_grad()
def channel_maxima(
    model: PreTrainedModel, points: list[QuantPoint], ids: torch.Tensor, step: Step
) -> dict[QuantPoint, torch.Tensor]:
    """Return by point the largest magnitude of every channel [in] on text with ids [N,T]."""
    maxima: dict[QuantPoint, torch.Tensor] = {}

    def record(point: QuantPoint, _: int, x: torch.Tensor) -> None:
        largest = x.abs().flatten(0, -2).amax(0).float()
        maxima[point] = torch.maximum(maxima[point], largest) if point in maxima else largest

    batches = _batches(ids)
    with bf16_autocast(model), _watching(model, points, record):
        for done, batch in enumerate(batches):
            model.model(input_ids=batch, use_cache=False)
            step(done + 1, len(batches))
    return maxima


def static_scales(
    model: PreTrainedModel,
    maxima: Mapping[QuantPoint, torch.Tensor],
    scheme: WeightScheme,
    ids: torch.Tensor,
    step: Step,
) -> dict[QuantPoint, StaticScale]:
    """Return each point's scale of least loss on text with ids [N,T].

    maxima: the result of `channel_maxima` on another text. scheme: the scheme of weights.
    """
    losses, batches = _Losses(maxima), _batches(ids)
    with bf16_autocast(model), losses.collecting(model, scheme):
        for done, batch in enumerate(batches):
            embedded = model.get_input_embeddings()(batch).requires_grad_()
            hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
            hidden.backward(_likelihood_gradient(model, hidden.detach(), batch))
            step(done + 1, len(batches))
    # The first token of each sequence is not predicted.
    return losses.best(tokens=ids.shape[0] * (ids.shape[1] - 1))


def _likelihood_gradient(
    model: PreTrainedModel, hidden: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the log-likelihood of ids [N,T] at `hidden`, both [N,T,H], times
    LOSS_SCALE. The logits of only one sequence at a time are in memory."""
    gradients = torch.zeros_like(hidden)
    for states, tokens, gradient in zip(hidden, ids, gradients, strict=True):
        inputs = states[:-1].requires_grad_()
        logits = model.lm_head(inputs).float()
        likelihood = logits.log_softmax(-1).gather(1, tokens[1:, None]).sum()
        gradient[:-1] = torch.autograd.grad(likelihood * LOSS_SCALE, inputs)[0]
    return gradients


def _batches(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split sequences [N,T] into batches of at most BATCH_TOKENS tokens, or of one longer one."""
    return torch.split(ids, max(1, BATCH_TOKENS // ids.shape[1]))


class _Losses:
    """Sums up, for each point, the estimated losses from rounding, in nats.

    covering: the scale that just covers the maxima.
    inputs: the losses from rounding the tensor, one for each factor of CLIPS.
    weights: the loss from rounding the readers' weights.
    """

    def __init__(self, maxima: Mapping[QuantPoint, torch.Tensor]) -> None:
        self.covering = {
            point: max(float(largest.max()), 1e-8) / MAX_CODE for point, largest in maxima.items()
        }
        self.inputs = {point: torch.zeros(len(CLIPS), dtype=torch.float64) for point in maxima}
        self.weights = dict.fromkeys(maxima, 0.0)

    @contextmanager
    def collecting(self, model: PreTrainedModel, scheme: WeightScheme) -> Iterator[None]:
        """Let every backward pass within the block add to the sums."""
        layers = linear_layers(model)
        with _watching(model, self.inputs, self._input_watch()), ExitStack() as hooks:
            for point in self.inputs:
                for name in point.readers:
                    hooks.callback(
                        layers[name].register_forward_hook(self._output_hook(point, scheme)).remove
                    )
            yield

    def best(self, tokens: int) -> dict[QuantPoint, StaticScale]:
        """Return each point's scale of least loss. tokens: how many were predicted in all."""
        scales = {}
        for point, losses in self.inputs.items():
            clip = int(losses.argmin())
            loss = (float(losses[clip]) + self.weights[point]) / tokens
            scales[point] = StaticScale(self.covering[point] * CLIPS[clip], loss)
        return scales

    def _input_watch(self) -> Watch:
        """Return a function that adds to `inputs` when all readers of a point have gradients."""
        tensors: dict[QuantPoint, torch.Tensor] = {}
        gradients: dict[QuantPoint, torch.Tensor] = {}
        readers_left: dict[QuantPoint, int] = {}

        def watch(point: QuantPoint, reader: int, x: torch.Tensor) -> torch.Tensor:
            if reader == 0:
                tensors[point] = x.detach()
                readers_left[point] = len(point.readers)
                gradients[point] = torch.zeros_like(x)
            # The gradient at x itself would include what else reads x, such as the residual sum.
            view = x.view_as(x)
            view.register_hook(lambda gradient: collect(point, gradient))  # type: ignore[no-untyped-call]
            return view

        def collect(point: QuantPoint, gradient: torch.Tensor) -> None:
            gradients[point] += gradient
            readers_left[point] -= 1
            if not readers_left[point]:
                self.inputs[point] += _clip_losses(
                    tensors.pop(point), gradients.pop(point), self.covering[point]
                )

        return watch

    def _output_hook(self, point: QuantPoint, scheme: WeightScheme) -> Callable[..., None]:
        """Return a hook for a reader of `point` that adds to `weights` in the backward pass."""

        def hook(layer: torch.nn.Linear, inputs: tuple[torch.Tensor], y: torch.Tensor) -> None:
            error = round_to(scheme, layer.weight).dequantized() - layer.weight
            change = torch.nn.functional.linear(inputs[0].detach(), error)
            y.register_hook(lambda gradient: collect(gradient, change))  # type: ignore[no-untyped-call]

        def collect(gradient: torch.Tensor, change: torch.Tensor) -> None:
            self.weights[point] += float((_half_square(gradient) * change.float().square()).sum())

        return hook


def _clip_losses(x: torch.Tensor, gradient: torch.Tensor, covering: float) -> torch.Tensor:
    """Return the losses, float64 [len(CLIPS)], from rounding x with the scales CLIPS * covering.

    The work is done in place, on chunks that fit into a core's cache.
    """
    losses = torch.zeros(len(CLIPS), dtype=torch.float64)
    for part, slope in zip(
        torch.split(x.flatten(), CHUNK_ELEMENTS),
        torch.split(gradient.flatten(), CHUNK_ELEMENTS),
        strict=True,
    ):
        values, factors = part.float(), _half_square(slope)
        for index, clip in enumerate(CLIPS):
            change = round_activations(values, covering * clip).sub_(values)
            losses[index] += torch.dot(change.mul_(change), factors)
    return losses


def _half_square(gradient: torch.Tensor) -> torch.Tensor:
    """Return g^2 / 2, the loss per squared change of the tensor, for g = gradient / LOSS_SCALE."""
    return (gradient.float() / LOSS_SCALE).square() / 2


def too_costly(scales: Mapping[QuantPoint, StaticScale], budget: float) -> list[QuantPoint]:
    """Return the fewest points without which the sum of losses is at most `budget`."""
    left_out: list[QuantPoint] = []
    loss = sum(static.loss for static in scales.values())
    for point, static in sorted(scales.items(), key=lambda item: -item[1].loss):
        if loss <= budget:
            break
        loss -= static.loss
        left_out.append(point)
    return left_out


@contextmanager
def _watching(model: PreTrainedModel, points: Iterable[QuantPoint], watch: Watch) -> Iterator[None]:
    """Call `watch` within the block on every input of the readers of `points`."""

    def hook(point: QuantPoint, reader: int) -> Callable[..., tuple[torch.Tensor] | None]:
        def call(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
            replacement = watch(point, reader, inputs[0])
            return None if replacement is None else (replacement,)

        return call

    layers = linear_layers(model)
    with ExitStack() as hooks:
        for point in points:
            for index, name in enumerate(point.readers):
                hooks.callback(layers[name].register_forward_pre_hook(hook(point, index)).remove)
        yield
