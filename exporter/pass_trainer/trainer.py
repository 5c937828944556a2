"""Trains: runs the loop over steps, from step 0 or a checkpoint to the end of the schedule.

Random numbers depend only on the seed, the step and the row of the batch, so a resumed run gives
the same weights. The host launches a GPU's steps without waiting for them. Only at a *look*, about
once a second, it waits for the losses, looks at the clock, and decides what follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from pass_exporter.progress import Step
from pass_runtime.errors import PassError
from pass_trainer.checkpoint import Checkpoint, History
from pass_trainer.config import TrainConfig
from pass_trainer.distill import Sequences
from pass_trainer.drafter import Drafter
from pass_trainer.schedule import Schedule, Times, learning_rate_factor
from pass_trainer.training_text import TrainingText
from pass_trainer.windows import Windows, make_windows, on_device, sample_groups

EMBEDDING_LR_RATIO = 10.0
"""The embeddings' learning rate divided by that of adapter and head."""
MAX_GRADIENT_NORM = 1.0
ADAM_BETAS = (0.9, 0.98)
LOOK_SECONDS = 1.0
"""The time between two looks on a GPU. On a CPU there is a look after every step."""


@dataclass(frozen=True)
class Hooks:
    """Functions that the loop calls.

    text(sequences done, all sequences): is called while the first text is written.
    step(steps done, share of the run done, loss): is called at every look.
    evaluate(drafter, steps done): measures held-out sequences, and returns the results as JSON.
    """

    text: Step
    step: Callable[[int, float, float], None]
    evaluate: Callable[[Drafter, int], dict[str, Any]]


@dataclass(frozen=True)
class Look:
    """What the first process decides at a look for all processes.

    next_step: the number of steps at the next look. shards: how many shards of text a run with
    --minutes should have read now, see `TrainingText.wanted`. save: whether a checkpoint is due.
    """

    next_step: int
    shards: int
    save: bool


def make_optimizer(drafter: Drafter, lr: float) -> torch.optim.AdamW:
    """Return the optimizer, with a parameter group for each trained part."""
    groups: list[dict[str, Any]] = [{"params": [drafter.embeddings], "lr": lr * EMBEDDING_LR_RATIO}]
    groups += [
        {"params": list(part.parameters()), "lr": lr}
        for part in (drafter.adapter, drafter.head)
        if part
    ]
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
    text: TrainingText,
    hooks: Hooks,
    checkpoint: Checkpoint,
    schedule: Schedule,
) -> History:
    """Train `drafter` in place to the end of `schedule`, from the checkpoint if there is one."""
    optimizer = make_optimizer(drafter, config.lr)
    wrapped, optimizer = accelerator.prepare(drafter, optimizer)
    step, history = checkpoint.load()
    sequences = config.sequences_per_process * accelerator.num_processes
    text.begin(history.joins, step * sequences, hooks.text)
    schedule.continue_from(history.clock)

    def evaluate() -> None:
        history.evaluations.append(
            schedule.timed("measuring", lambda: hooks.evaluate(drafter, step))
        )

    def save() -> None:
        history.joins, history.clock = text.deck.joins, asdict(schedule.times())
        schedule.timed("saving", lambda: checkpoint.save(step, history))

    if schedule.by_clock and not history.evaluations:
        evaluate()  # This measures how much time to keep for the last evaluation.
    pace = Pace(accelerator, schedule, step)
    look, losses = pace.look(step, text, checkpoint), list[torch.Tensor]()
    if step == 0:
        schedule.check_text_in_time()
    while not schedule.is_over(step):
        text.join(step, look.shards)
        share = schedule.share(step)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * learning_rate_factor(
                share, step - history.stages[-1].start
            )
        drafter.set_aim(config.aim, share)
        loss = wrapped(*make_batch(config, text.sequences, text.deal(sequences), step, accelerator))
        optimizer.zero_grad()
        accelerator.backward(loss)
        clip_gradients(optimizer.param_groups)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean"))
        step += 1
        is_measured = schedule.is_measured_at(step)
        if step < look.next_step and not is_measured and not schedule.is_over(step):
            continue
        record_losses(losses, step, history, schedule, hooks)
        schedule.end_steps()
        if is_measured:
            evaluate()
        look = pace.look(step, text, checkpoint)
        if look.save and not schedule.is_over(step):
            save()
    if not history.evaluations or history.evaluations[-1]["step"] != step:
        evaluate()
    save()
    return history


class Pace:
    """Decides when the processes of a run look at the clock: all at the same steps."""

    def __init__(self, accelerator: Accelerator, schedule: Schedule, step: int) -> None:
        self._accelerator, self._schedule = accelerator, schedule
        self._first = step, schedule.now()

    def look(self, step: int, text: TrainingText, checkpoint: Checkpoint) -> Look:
        """Give `schedule` the first process's times, and return that process's decisions."""
        times = self._schedule.times()
        (first_step, start), steps_ahead = self._first, 1
        if self._accelerator.device.type != "cpu" and step > first_step:
            steps_per_second = (step - first_step) / max(times.now - start, 1e-9)
            steps_ahead = max(int(LOOK_SECONDS * steps_per_second), 1)
        is_deciding = self._accelerator.is_main_process and self._schedule.by_clock
        shards = text.wanted() if is_deciding else 0
        values = [*astuple(times), step + steps_ahead, shards, checkpoint.is_due()]
        if self._accelerator.num_processes > 1:
            values = broadcast_object_list(values)
        *seconds, next_step, shards, save = values
        self._schedule.see(Times(*seconds))
        return Look(int(next_step), int(shards), bool(save))


def record_losses(
    losses: list[torch.Tensor], step: int, history: History, schedule: Schedule, hooks: Hooks
) -> None:
    """Move `losses` of the last steps from the device to the history, and report the last one."""
    values = torch.stack(losses).tolist()
    losses.clear()
    for loss_step, loss in enumerate(values, step - len(values)):
        if not math.isfinite(loss):
            raise PassError(
                f"the loss is not finite at step {loss_step}; use a smaller --lr, or --dtype fp32"
            )
    history.loss += values
    hooks.step(step, schedule.share(step), values[-1])


def clip_gradients(groups: list[dict[str, Any]]) -> None:
    """Scale each group's gradients to a norm of at most MAX_GRADIENT_NORM, with few kernels: with
    torch's clip_grad_norm_, every group would launch its own."""
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


def make_batch(
    config: TrainConfig, data: Sequences, dealt: list[int], step: int, accelerator: Accelerator
) -> tuple[torch.Tensor, Windows]:
    """Return this process's part of a step's sequences, [batch,N] int64, and their windows.

    dealt: the indices of the step's sequences, those of all processes.
    """
    batch = config.sequences_per_process
    first = accelerator.process_index * batch
    chosen, groups = dealt[first : first + batch], []
    for row, index in enumerate(chosen, first):  # `row` counts the sequences of all processes.
        rng = np.random.default_rng((config.seed, step, row))
        lengths = int(data.prompt_lengths[index]), int(data.lengths[index])
        groups.append(sample_groups(rng, *lengths, config.anchors, config.lookahead, config.decay))
    width = int(data.lengths[chosen].max())
    tokens = on_device(data.tokens[chosen, :width], accelerator.device)
    return tokens, make_windows(groups, width, accelerator.device)
