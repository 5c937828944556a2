"""The training loop.

Every step's randomness comes from (seed, step, sequence) alone, so a resumed run is the same run.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from pass_runtime.errors import PassError
from pass_trainer.config import TrainConfig
from pass_trainer.distill import Sequences
from pass_trainer.drafter import Drafter
from pass_trainer.windows import Windows, pack, sample_groups

WARMUP_STEPS, FINAL_LR = 20, 0.05
EMBEDDING_LR = 10.0
"""The embeddings' learning rate over the adapter's."""
GRADIENT_NORM = 1.0
BETAS = (0.9, 0.98)
CHECKPOINT, OLD = "checkpoint", ".old"
STATE_FILE = "progress.json"


@dataclass
class History:
    """Curves: loss[i] is step i's; evaluations are what the `evaluate` hook measured, by step."""

    loss: list[float] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Hooks:
    """What the loop calls. step: (step, loss). evaluate: held-out measurement of the drafter, every so many steps."""

    step: Callable[[int, float], None]
    evaluate: Callable[[Drafter, int], dict[str, Any]]


def make_optimizer(drafter: Drafter, lr: float) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [{"params": [drafter.lookahead], "lr": lr * EMBEDDING_LR}]
    groups += [{"params": list(part.parameters()), "lr": lr} for part in (drafter.adapter, drafter.head) if part]
    for group in groups:
        group["base_lr"] = group["lr"]
    return torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.0)


def schedule(step: int, steps: int) -> float:
    """Factor on the learning rates: linear warm-up, then a cosine down to FINAL_LR."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (cosine * (1 - FINAL_LR) + FINAL_LR)


def train(config: TrainConfig, accelerator: Accelerator, drafter: Drafter, data: Sequences, hooks: Hooks) -> History:
    """Train `drafter` in place for `config.steps`, from the last checkpoint if there is one."""
    optimizer = make_optimizer(drafter, config.lr)
    wrapped, optimizer = accelerator.prepare(drafter, optimizer)
    checkpoint = Checkpoint(config, accelerator)
    step, history = checkpoint.load()
    every = max(config.steps // 10, 1)
    while step < config.steps:
        tokens, windows = batch_of(config, data, step, accelerator.process_index, accelerator.num_processes)
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * schedule(step, config.steps)
        loss = wrapped(tokens.to(accelerator.device), windows.to(accelerator.device))
        optimizer.zero_grad()
        accelerator.backward(loss)
        for group in optimizer.param_groups:
            accelerator.clip_grad_norm_(group["params"], GRADIENT_NORM)
        optimizer.step()
        mean = float(accelerator.reduce(loss.detach(), "mean"))
        if not math.isfinite(mean):
            raise PassError(f"the loss is not finite at step {step}; use a smaller --lr, or --dtype fp32")
        history.loss.append(mean)
        step += 1
        hooks.step(step, mean)
        if step % every == 0 or step == config.steps:
            history.evaluations.append(hooks.evaluate(drafter, step))
        if step == config.steps or checkpoint.is_due():
            checkpoint.save(step, history)
    return history


def batch_of(
    config: TrainConfig, data: Sequences, step: int, process: int, processes: int
) -> tuple[torch.Tensor, Windows]:
    """This process's sequences of a step, [batch,N] and their windows. Slots are numbered over all processes."""
    chosen, groups = [], []
    for slot in range(process * config.batch, (process + 1) * config.batch):
        # Each run through the data is a permutation of it; slots take consecutive places.
        place = step * config.batch * processes + slot
        order = np.random.default_rng((config.seed, place // len(data))).permutation(len(data))
        index = int(order[place % len(data)])
        rng = np.random.default_rng((config.seed, step, slot))
        prompt, length = int(data.prompts[index]), int(data.lengths[index])
        groups.append(sample_groups(rng, prompt, length, config.anchors, config.lookahead, config.decay))
        chosen.append(index)
    width = int(data.lengths[chosen].max())
    return data.tokens[chosen, :width], pack(groups, width)


class Checkpoint:
    """`output`/checkpoint: trained weights, optimizer and history; replaced as a whole."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        self._config, self._accelerator = config, accelerator
        self._path = config.output / CHECKPOINT
        self._saved = time.monotonic()

    def is_due(self) -> bool:
        due = time.monotonic() - self._saved > 60 * self._config.checkpoint_minutes
        flag = torch.tensor(float(due), device=self._accelerator.device)
        return bool(self._accelerator.reduce(flag, "sum") > 0)  # all processes, or none

    def save(self, step: int, history: History) -> None:
        accelerator, part = self._accelerator, self._path.with_suffix(".partial")
        if accelerator.is_main_process:
            shutil.rmtree(part, ignore_errors=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(part))
        accelerator.wait_for_everyone()  # every process has a file in it
        if accelerator.is_main_process:
            state = {
                "step": step,
                "settings": self._config.what_is_trained(),
                "loss": history.loss,
                "evaluations": history.evaluations,
            }
            (part / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
            replace_directory(part, self._path)
        accelerator.wait_for_everyone()
        self._saved = time.monotonic()

    def load(self) -> tuple[int, History]:
        """Step to go on with, and the history so far; (0, nothing) without a checkpoint."""
        old = self._path.with_suffix(OLD)
        if old.is_dir() and not self._path.is_dir() and self._accelerator.is_main_process:
            old.rename(self._path)  # a save was cut off between its two renames
        self._accelerator.wait_for_everyone()
        if not self._path.is_dir():
            return 0, History()
        try:
            state = json.loads((self._path / STATE_FILE).read_text(encoding="utf-8"))
            settings = json.loads(json.dumps(self._config.what_is_trained()))
            if different := [key for key in settings if settings[key] != state["settings"].get(key)]:
                raise PassError(
                    f"{self._path} was made with another --{different[0]} ({state['settings'].get(different[0])}); "
                    "give the same options, or another -o"
                )
            self._accelerator.load_state(str(self._path))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise PassError(f"cannot resume from {self._path}: {error}; delete it to start again") from None
        return state["step"], History(state["loss"], state["evaluations"])


def replace_directory(part: Path, path: Path) -> None:
    """Put the finished directory `part` at `path`; a crash in between leaves one of the two."""
    old = path.with_suffix(OLD)
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    part.rename(path)
    shutil.rmtree(old, ignore_errors=True)
