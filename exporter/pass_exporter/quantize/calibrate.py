"""Chooses the static activation scale of every quantization point, on some text.

The cost of rounding is estimated as a change of the model's loss. If rounding changes a tensor by
d, the mean log-likelihood changes by about the mean over rows of sum(g^2 d^2) / 2, with g the
gradient at the tensor (the diagonal of the empirical Fisher information). One forward and one
backward pass give this for every point and any number of scales, and for the outputs of layers
whose weights are rounded. For SmolLM2 the sum over all static layers was 0.029 nats per token; the
real loss was 0.044 on Wikipedia and 0.028 on code. Measured on the text that gave the channel
maxima, the sum would be half as large.
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
"""Scales to try, as factors of the scale that covers `channel_maxima`; values beyond a scale are
clipped. Some factors exceed 1, because an MLP may output values ten times as large as any in the
thousands of tokens that gave the maxima."""
BATCH_TOKENS = 512
"""Tokens per pass. It bounds the memory of the activations that are kept for the backward pass."""
LOSS_SCALE = 256.0
"""The likelihood is multiplied by it, so that small gradients do not vanish in float16."""

Watch = Callable[[QuantPoint, int, torch.Tensor], torch.Tensor | None]
"""(point, index of the reader, its input) -> a replacement for the input, or None for no change."""


@dataclass(frozen=True)
class StaticScale:
    """A point's static scale.

    scale: of its int8 codes.
    loss: the estimated cost, in nats per token, of rounding the tensor and its readers' weights.
    """

    scale: float
    loss: float


def activation_codes(x: torch.Tensor, scale: float) -> torch.Tensor:
    """QuantizeLinear(x) to int8 with zero point 0, in the dtype of x."""
    return (x / scale).round_().clamp_(-MAX_CODE - 1, MAX_CODE)


def round_activations(x: torch.Tensor, scale: float) -> torch.Tensor:
    """DequantizeLinear(QuantizeLinear(x)) with zero point 0."""
    return activation_codes(x, scale).mul_(scale)


@torch.no_grad()
def channel_maxima(
    model: PreTrainedModel, points: list[QuantPoint], ids: torch.Tensor, step: Step
) -> dict[QuantPoint, torch.Tensor]:
    """Return the largest magnitude of every channel [in] on the text ids [N,T]."""
    found: dict[QuantPoint, torch.Tensor] = {}

    def record(point: QuantPoint, x: torch.Tensor) -> None:
        largest = x.abs().flatten(0, -2).amax(0).float()
        found[point] = torch.maximum(found[point], largest) if point in found else largest

    batches = _batches(ids)
    with bf16_autocast(model), _watching(model, points, lambda point, _, x: record(point, x)):
        for done, rows in enumerate(batches):
            model.model(input_ids=rows, use_cache=False)
            step(done + 1, len(batches))
    return found


def static_scales(
    model: PreTrainedModel,
    maxima: Mapping[QuantPoint, torch.Tensor],
    scheme: WeightScheme,
    ids: torch.Tensor,
    step: Step,
) -> dict[QuantPoint, StaticScale]:
    """Return each point's scale of least cost on the text ids [N,T]. scheme: of weights."""
    losses, batches = _Losses(maxima), _batches(ids)
    with bf16_autocast(model), losses.measured(model, scheme):
        for done, rows in enumerate(batches):
            embedded = model.get_input_embeddings()(rows).requires_grad_()
            hidden = model.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
            hidden.backward(_likelihood_gradient(model, hidden.detach(), rows))
            step(done + 1, len(batches))
    return losses.best(tokens=ids.shape[0] * (ids.shape[1] - 1))


def _likelihood_gradient(
    model: PreTrainedModel, hidden: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the gradient [N,T,H] of the log-likelihood of ids [N,T] at hidden, times LOSS_SCALE.

    Works on one sequence at a time, so that only one sequence's logits are in memory.
    """
    found = torch.zeros_like(hidden)
    for states, tokens, gradient in zip(hidden, ids, found, strict=True):
        inputs = states[:-1].requires_grad_()
        logits = model.lm_head(inputs).float()
        likelihood = logits.log_softmax(-1).gather(1, tokens[1:, None]).sum()
        gradient[:-1] = torch.autograd.grad(likelihood * LOSS_SCALE, inputs)[0]
    return found


def _batches(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split the sequences [N,T] into batches of BATCH_TOKENS tokens, or of one sequence."""
    return torch.split(ids, max(1, BATCH_TOKENS // ids.shape[1]))


class _Losses:
    """The cost of rounding by point, in nats, summed over the tokens so far.

    covering: the scale that covers the maxima. inputs: the cost of rounding the tensor, for every
    factor in CLIPS.
    weights: the cost of rounding the readers' weights.
    """

    def __init__(self, maxima: Mapping[QuantPoint, torch.Tensor]) -> None:
        self.covering = {
            point: max(float(largest.max()), 1e-8) / MAX_CODE for point, largest in maxima.items()
        }
        self.inputs = {point: torch.zeros(len(CLIPS), dtype=torch.float64) for point in maxima}
        self.weights = dict.fromkeys(maxima, 0.0)

    @contextmanager
    def measured(self, model: PreTrainedModel, scheme: WeightScheme) -> Iterator[None]:
        """Within the block, every backward pass adds to the sums."""
        layers = linear_layers(model)
        with _watching(model, self.inputs, self._input_watch()), ExitStack() as hooks:
            for point in self.inputs:
                for name in point.readers:
                    hooks.callback(
                        layers[name].register_forward_hook(self._output_hook(point, scheme)).remove
                    )
            yield

    def best(self, tokens: int) -> dict[QuantPoint, StaticScale]:
        found = {}
        for point, losses in self.inputs.items():
            clip = int(losses.argmin())
            loss = (float(losses[clip]) + self.weights[point]) / tokens
            found[point] = StaticScale(self.covering[point] * CLIPS[clip], loss)
        return found

    def _input_watch(self) -> Watch:
        seen: dict[QuantPoint, torch.Tensor] = {}
        gradients: dict[QuantPoint, torch.Tensor] = {}
        missing: dict[QuantPoint, int] = {}

        def watch(point: QuantPoint, reader: int, x: torch.Tensor) -> torch.Tensor:
            """Give each reader its own view: its gradient leaves out users such as the residual."""
            if not reader:
                seen[point] = x.detach()
                missing[point] = len(point.readers)
                gradients[point] = torch.zeros_like(x)
            view = x.view_as(x)
            view.register_hook(lambda gradient: collect(point, gradient))  # type: ignore[no-untyped-call]
            return view

        def collect(point: QuantPoint, gradient: torch.Tensor) -> None:
            gradients[point] += gradient
            missing[point] -= 1
            if not missing[point]:
                self.inputs[point] += _clip_losses(
                    seen.pop(point), gradients.pop(point), self.covering[point]
                )

        return watch

    def _output_hook(self, point: QuantPoint, scheme: WeightScheme) -> Callable[..., None]:
        def hook(layer: torch.nn.Linear, inputs: tuple[torch.Tensor], y: torch.Tensor) -> None:
            error = round_to(scheme, layer.weight).dequantized() - layer.weight
            moved = torch.nn.functional.linear(inputs[0].detach(), error)
            y.register_hook(lambda gradient: collect(gradient, moved))  # type: ignore[no-untyped-call]

        def collect(gradient: torch.Tensor, moved: torch.Tensor) -> None:
            self.weights[point] += float((_fisher(gradient) * moved.float().square()).sum())

        return hook


def _clip_losses(x: torch.Tensor, gradient: torch.Tensor, covering: float) -> torch.Tensor:
    """Return the costs of rounding x with CLIPS times the scale `covering`, float64 [len(CLIPS)].

    Works in place, on chunks that fit into a core's cache.
    """
    losses = torch.zeros(len(CLIPS), dtype=torch.float64)
    for part, slope in zip(
        torch.split(x.flatten(), CHUNK_ELEMENTS),
        torch.split(gradient.flatten(), CHUNK_ELEMENTS),
        strict=True,
    ):
        values, weight = part.float(), _fisher(slope)
        for index, clip in enumerate(CLIPS):
            moved = round_activations(values, covering * clip).sub_(values)
            losses[index] += torch.dot(moved.mul_(moved), weight)
    return losses


def _fisher(gradient: torch.Tensor) -> torch.Tensor:
    """g^2 / 2, the factor from a squared change of the tensor to its cost."""
    return (gradient.float() / LOSS_SCALE).square() / 2


def too_costly(found: Mapping[QuantPoint, StaticScale], budget: float) -> list[QuantPoint]:
    """Return the fewest points without which the others cost at most `budget` nats per token."""
    rest, left_out = sum(static.loss for static in found.values()), []
    for point, static in sorted(found.items(), key=lambda item: -item[1].loss):
        if rest <= budget:
            break
        rest -= static.loss
        left_out.append(point)
    return left_out


@contextmanager
def _watching(model: PreTrainedModel, points: Iterable[QuantPoint], watch: Watch) -> Iterator[None]:
    """Within the block, `watch` is called on every input of the readers of `points`."""

    def hook(point: QuantPoint, reader: int) -> Callable[..., tuple[torch.Tensor] | None]:
        def call(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
            changed = watch(point, reader, inputs[0])
            return None if changed is None else (changed,)

        return call

    layers = linear_layers(model)
    with ExitStack() as hooks:
        for point in points:
            for index, name in enumerate(point.readers):
                hooks.callback(layers[name].register_forward_pre_hook(hook(point, index)).remove)
        yield
