"""The training loop.

Random numbers depend only on the seed, the step and the row of the batch, so a resumed run gives the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from pass_runtime.errors import PassError
from pass_trainer.checkpoint import Checkpoint, History, Stage
from pass_trainer.config import TrainConfig
from pass_trainer.distill import Sequences
from pass_trainer.drafter import Drafter
from pass_trainer.windows import Windows, make_windows, sample_groups

WARMUP_STEPS, FINAL_LR_RATIO = 20, 0.05
EMBEDDING_LR_RATIO = 10.0
"""The embeddings' learning rate divided by that of adapter and head."""
MAX_GRADIENT_NORM = 1.0
ADAM_BETAS = (0.9, 0.98)


@dataclass(frozen=True)
class Hooks:
    """Functions that the loop calls.

    step(steps done, loss): after every step. evaluate(drafter, steps done): after every tenth of a run; it measures
    held-out sequences.
    """

    step: Callable[[int, float], None]
    evaluate: Callable[[Drafter, int], dict[str, Any]]


def make_optimizer(drafter: Drafter, lr: float) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [{"params": [drafter.lookahead], "lr": lr * EMBEDDING_LR_RATIO}]
    groups += [{"params": list(part.parameters()), "lr": lr} for part in (drafter.adapter, drafter.head) if part]
    for group in groups:
        group["base_lr"] = group["lr"]
    return torch.optim.AdamW(groups, betas=ADAM_BETAS, weight_decay=0.0)


def learning_rate_factor(step: int, stage: Stage) -> float:
    """Return the factor of the learning rates: a cosine from step 0 to `stage.steps`, which ends at FINAL_LR_RATIO,
    times a linear warm-up of WARMUP_STEPS from `stage.start` on."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return min(1.0, (step - stage.start + 1) / WARMUP_STEPS) * (cosine * (1 - FINAL_LR_RATIO) + FINAL_LR_RATIO)


def train(
    config: TrainConfig,
    accelerator: Accelerator,
    drafter: Drafter,
    data: Sequences,
    hooks: Hooks,
    checkpoint: Checkpoint,
) -> History:
    """Train `drafter` in place up to step `config.steps`, continuing from the last checkpoint if there is one."""
    optimizer = make_optimizer(drafter, config.lr)
    wrapped, optimizer = accelerator.prepare(drafter, optimizer)
    step, history = checkpoint.load()
    steps_per_evaluation = max(config.steps // 10, 1)
    while step < config.steps:
        tokens, windows = make_batch(config, data, step, accelerator.process_index, accelerator.num_processes)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * learning_rate_factor(step, history.stages[-1])
        loss = wrapped(tokens.to(accelerator.device), windows.to(accelerator.device))
        optimizer.zero_grad()
        accelerator.backward(loss)
        for group in optimizer.param_groups:
            accelerator.clip_grad_norm_(group["params"], MAX_GRADIENT_NORM)
        optimizer.step()
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        if not math.isfinite(mean):
            raise PassError(f"the loss is not finite at step {step}; use a smaller --lr, or --dtype fp32")
        history.loss.append(mean)
        step += 1
        hooks.step(step, mean)
        if step % steps_per_evaluation == 0 or step == config.steps:
            history.evaluations.append(hooks.evaluate(drafter, step))
        if step == config.steps or checkpoint.is_due():
            checkpoint.save(step, history)
    return history


def make_batch(
    config: TrainConfig, data: Sequences, step: int, process: int, processes: int
) -> tuple[torch.Tensor, Windows]:
    """Return this process's sequences of a step, [batch,N] int64, and their windows."""
    chosen, groups = [], []
    for row in range(process * config.batch, (process + 1) * config.batch):  # rows of the batch of all processes
        # Each epoch permutes the data, and the rows of its steps take consecutive sequences of the permutation.
        epoch, place = divmod(step * config.batch * processes + row, len(data))
        index = int(np.random.default_rng((config.seed, epoch)).permutation(len(data))[place])
        rng = np.random.default_rng((config.seed, step, row))
        prompt, length = int(data.prompt_lengths[index]), int(data.lengths[index])
        groups.append(sample_groups(rng, prompt, length, config.anchors, config.lookahead, config.decay))
        chosen.append(index)
    width = int(data.lengths[chosen].max())
    return data.tokens[chosen, :width], make_windows(groups, width)
