"""Trains, from step 0 or a checkpoint to the end of the schedule.

A GPU's steps are launched without waiting for them. At a *look*, about once a second, the host
waits for the losses, looks at the clock, and decides what follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from pass_runtime.errors import PassError
from pass_trainer.checkpoint import Checkpoint, Clock, History
from pass_trainer.config import TrainConfig
from pass_trainer.drafter import Drafter
from pass_trainer.text import Sequences
from pass_trainer.windows import Windows, make_windows, on_device, sample_groups

WARMUP_STEPS, FINAL_LR_RATIO = 20, 0.05
EMBEDDING_LR_RATIO = 10.0
"""Of the embeddings, relative to an adapter's A and the head."""
ADAPTER_B_LR_RATIO = 8.0
"""Of a new adapter's B, relative to its A (LoRA+, arXiv 2402.12354)."""
MAX_GRADIENT_NORM = 1.0
ADAM_BETAS = (0.9, 0.98)
LOOK_SECONDS = 1.0
"""Between looks on a GPU. On a CPU every step ends with one."""
MEASUREMENTS = 10
"""Of held-out sequences in a run, if they take at most a tenth of its time."""
TEXT_SHARE = 0.45
"""Of a run with --minutes, to write text."""
WRITING_SECONDS = 5.0
"""Kept at the end of a run with --minutes to write weights, curves and card."""


@dataclass(frozen=True)
class Times:
    """Seconds from the run's start to now, to the training's, and to the last measurement's end;
    and the longest that a measurement, a save, and the steps between two looks took."""

    now: float = 0.0
    training: float = 0.0
    measured: float = 0.0
    measuring: float = 0.0
    saving: float = 0.0
    stepping: float = 0.0


class Schedule:
    """Says how far a run is, by steps or by the clock. Processes decide alike, by the times that
    the first one had at the last look."""

    def __init__(
        self, steps: int | None, minutes: float | None, clock: Clock = time.monotonic
    ) -> None:
        self._steps, self._minutes = steps, minutes
        self._clock, self._start = clock, clock()
        self.by_clock = minutes is not None
        self._own = self._seen = Times()  # of this process, and of the last look
        self._steps_start = 0.0
        self._first_look: tuple[int, float] | None = None

    def now(self) -> float:
        """Return the seconds of the run, earlier ones of a resumed run included."""
        return self._clock() - self._start

    def begin_training(self, saved: dict[str, float]) -> None:
        """saved: the times in a checkpoint; {} for a new run."""
        self._start -= saved.get("now", 0.0)
        self._own = self._seen = Times(**saved) if saved else Times(training=self.now())

    def times(self) -> Times:
        return replace(self._own, now=self.now())

    def see(self, times: Times) -> None:
        """Decide by these times until the next call."""
        self._seen, self._steps_start = times, self.now()

    def look(self, accelerator: Accelerator, step: int, checkpoint: Checkpoint) -> tuple[int, bool]:
        """See the first process's times. Return its decisions: the step of the next look, and
        whether a checkpoint is due."""
        self._first_look = self._first_look or (step, self.now())
        (first_step, start), steps_ahead = self._first_look, 1
        if accelerator.device.type != "cpu" and step > first_step:
            steps_per_second = (step - first_step) / max(self.now() - start, 1e-9)
            steps_ahead = max(int(LOOK_SECONDS * steps_per_second), 1)
        decided: list[Any] = [self.times(), step + steps_ahead, checkpoint.is_due()]
        if accelerator.num_processes > 1:
            broadcast_object_list(decided)
        times, next_look, is_due = decided
        self.see(times)
        return next_look, is_due

    def end_steps(self) -> None:
        seconds = self.now() - self._steps_start
        self._own = replace(self._own, stepping=max(self._own.stepping, seconds))

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Note how long the block took as Times.<what>."""
        start = self.now()
        yield
        self._own = replace(self._own, **{what: max(getattr(self._own, what), self.now() - start)})
        if what == "measuring":
            self._own = replace(self._own, measured=self.now())
        self._steps_start = self.now()

    def has_time_for_text(self) -> bool:
        return self._minutes is None or self.now() < TEXT_SHARE * 60 * self._minutes

    def share(self, step: int) -> float:
        if self._steps is not None:
            return step / self._steps
        seen = self._seen
        return min(max(seen.now - seen.training, 0.0) / max(self._end - seen.training, 1e-9), 1.0)

    def is_over(self, step: int) -> bool:
        return step >= self._steps if self._steps is not None else self._seen.now >= self._end

    def is_measured_at(self, step: int) -> bool:
        if self._steps is not None:
            return step % max(self._steps // MEASUREMENTS, 1) == 0
        seen = self._seen
        interval = max((self._end - seen.training) / MEASUREMENTS, 10 * seen.measuring)
        return seen.now - seen.measured >= interval

    def check_text_in_time(self) -> None:
        if self._minutes is not None and self.now() >= self._end:
            raise PassError(
                f"--minutes {self._minutes:g} passed before there was text to train on; give "
                "more minutes"
            )

    @property
    def _end(self) -> float:
        # What remains is for the last steps, a measurement, a save, and writing the results.
        assert self._minutes is not None
        expected = self._seen.stepping + self._seen.measuring + self._seen.saving
        return 60 * self._minutes - 1.25 * expected - WRITING_SECONDS  # a quarter more, to be safe


def learning_rate_factor(share: float, step: int) -> float:
    """Return a cosine over the run times a linear warm-up. step: since the stage began."""
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (cosine * (1 - FINAL_LR_RATIO) + FINAL_LR_RATIO)


def make_optimizer(drafter: Drafter, lr: float) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [{"params": [drafter.embeddings], "lr": lr * EMBEDDING_LR_RATIO}]
    if drafter.adapter is not None:
        is_new = not any(b.any() for b in drafter.adapter.lora_B)
        ratio = ADAPTER_B_LR_RATIO if is_new else 1.0
        groups.append({"params": list(drafter.adapter.lora_A), "lr": lr})
        groups.append({"params": list(drafter.adapter.lora_B), "lr": lr * ratio})
    if drafter.head is not None:
        groups.append({"params": list(drafter.head.parameters()), "lr": lr})
    for group in groups:
        group["base_lr"] = group["lr"]
    # A CPU's fused kernel rounds otherwise: a seed would give other weights than in past versions.
    return torch.optim.AdamW(
        groups, betas=ADAM_BETAS, weight_decay=0.0, fused=drafter.embeddings.is_cuda
    )


def train(
    config: TrainConfig,
    accelerator: Accelerator,
    drafter: Drafter,
    text: Sequences,
    on_step: Callable[[int, float, float], None],
    measure: Callable[[int], dict[str, Any]],
    checkpoint: Checkpoint,
    schedule: Schedule,
    history: History,
) -> None:
    """Train `drafter` in place to the end of `schedule`, and continue `history`.

    on_step(steps done, share done, loss): is called at every look. measure(steps done): measures
    held-out sequences.
    """
    step = len(history.loss)
    optimizer = make_optimizer(drafter, config.lr)
    wrapped, optimizer = accelerator.prepare(drafter, optimizer)
    checkpoint.restore()
    schedule.begin_training(history.clock)

    def evaluate() -> None:
        with schedule.timed("measuring"):
            history.evaluations.append(measure(step))

    def save() -> None:
        history.clock = asdict(schedule.times())
        with schedule.timed("saving"):
            checkpoint.save(history)

    if schedule.by_clock and not history.evaluations:
        evaluate()  # This measures how much time to keep for the last evaluation.
    losses = list[torch.Tensor]()
    next_look, save_is_due = schedule.look(accelerator, step, checkpoint)
    if step == 0:
        schedule.check_text_in_time()
    while not schedule.is_over(step):
        factor = learning_rate_factor(schedule.share(step), step - history.stages[-1].start)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        loss = wrapped(*make_batch(config, text, step, accelerator))
        optimizer.zero_grad()
        accelerator.backward(loss)
        clip_gradients(optimizer.param_groups)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
        step += 1
        is_measured = schedule.is_measured_at(step)
        if step < next_look and not is_measured and not schedule.is_over(step):
            continue
        history.loss += finite(losses, step)
        losses.clear()
        on_step(step, schedule.share(step), history.loss[-1])
        schedule.end_steps()
        if is_measured:
            evaluate()
        next_look, save_is_due = schedule.look(accelerator, step, checkpoint)
        if save_is_due and not schedule.is_over(step):
            save()
    if not history.evaluations or history.evaluations[-1]["step"] != step:
        evaluate()
    save()


def finite(losses: list[torch.Tensor], step: int) -> list[float]:
    """Raises PassError if a loss of the steps before `step` is not finite."""
    values: list[float] = torch.stack(losses).tolist()
    for loss_step, loss in enumerate(values, step - len(values)):
        if not math.isfinite(loss):
            raise PassError(
                f"the loss is not finite at step {loss_step}; use a smaller --lr, or --dtype fp32"
            )
    return values


def clip_gradients(groups: list[dict[str, Any]]) -> None:
    """Clip each group's gradients to MAX_GRADIENT_NORM. torch's clip_grad_norm_ would launch more
    kernels."""
    gradients: list[torch.Tensor] = []
    owners: list[int] = []  # the index of each gradient's group
    for index, group in enumerate(groups):
        of_group = [p.grad for p in group["params"] if p.grad is not None]
        gradients += of_group
        owners += [index] * len(of_group)
    squares = torch.stack(torch._foreach_norm(gradients)).square()
    group_index = on_device(torch.tensor(owners), squares.device)
    norms = squares.new_zeros(len(groups)).index_add(0, group_index, squares).sqrt()
    factors = (MAX_GRADIENT_NORM / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, list(factors[group_index].unbind()))


def chosen_at(step: int, count: int, sequences: int, seed: int) -> list[int]:
    """Return the indices of a step's `count` sequences: each epoch has an order of its own."""
    places = range(step * count, (step + 1) * count)
    epochs = {place // sequences for place in places}
    orders = {e: np.random.default_rng((seed, e)).permutation(sequences) for e in epochs}
    return [int(orders[place // sequences][place % sequences]) for place in places]


def make_batch(
    config: TrainConfig, data: Sequences, step: int, accelerator: Accelerator
) -> tuple[torch.Tensor, Windows]:
    """Return this process's sequences of a step, [batch,N] int64, and their windows."""
    batch = config.sequences_per_process
    count = batch * accelerator.num_processes
    first = accelerator.process_index * batch
    chosen = chosen_at(step, count, len(data), config.seed)[first : first + batch]
    groups = []
    for row, index in enumerate(chosen, first):  # `row` counts the sequences of all processes.
        rng = np.random.default_rng((config.seed, step, row))
        lengths = int(data.prompt_lengths[index]), int(data.lengths[index])
        groups.append(sample_groups(rng, *lengths, config.anchors, config.lookahead, config.decay))
    width = int(data.lengths[chosen].max())
    tokens = on_device(data.tokens[chosen, :width], accelerator.device)
    return tokens, make_windows(groups, width, accelerator.device)
