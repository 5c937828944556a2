"""Holds and checks the options of a training run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.errors import PassError
from pass_trainer.distill import Recipe
from pass_trainer.drafter import Aim

AdapterKind = Literal["none", "lora"]
WriteWith = Literal["auto", "torch", "w8a8"]
WriteText = Literal["auto", "first", "between", "beside"]
TrainDtype = Literal["fp32", "bf16"]

HEAD_RANK, HEAD_WIDTH = 96, 384
"""Default sizes of a new draft head. Larger ones cost a CPU more than they gain."""
MAX_HELD_OUT = 32
"""At most so many sequences are held out by default."""


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run. Raises PassError if one is out of range.

    model, revision: what pass-export takes.
    data: text files, directories or JSON lines from which prompts are taken; `self` lets the model
    write prompts.
    output: the directory of the run.
    lookahead: L, the number of look-ahead embeddings.
    adapter: `lora` trains low-rank adapters of `rank` for look-ahead rows, in the layers from
    `adapter_from` on.
    head: whether a draft head is trained, too. head_rank is the number of columns of its token
    table, head_width the size of its state. None means the sizes of the head of `start`, or
    HEAD_RANK and HEAD_WIDTH. A smaller head of `start` is widened.
    start: a weights file to start from; its adapter is truncated to `rank`.
    write_with: what writes training text, see `text_supply.text_writer_name`.
    write_text: when training text is written, see `text_supply`.
    recipe: how training text is made.
    steps: the number of optimizer steps.
    minutes: in place of `steps`, the time from the start of the run to its written weights.
    batch: sequences per step and process; None means `device_sizes.batch_size`.
    anchors: tokens per sequence after which drafts are trained.
    lr: the learning rate of adapter and head; that of the embeddings is ten times as high.
    decay: the loss weight of a draft relative to the draft before it.
    aim: the loss, see `Drafter.forward`.
    held_out: how many sequences are measured and not trained on; None means one in 16, at most
    MAX_HELD_OUT.
    dtype: the dtype of the frozen model; trained weights are fp32.
    resume: whether the run continues from the checkpoint in `output`, if there is one.
    checkpoint_minutes: the time between two checkpoints, or a tenth of `minutes` if that is less.
    """

    model: str
    data: tuple[Path, ...]
    output: Path
    lookahead: int = 4
    adapter: AdapterKind = "none"
    rank: int = 32
    adapter_from: int = 0
    head: bool = False
    head_rank: int | None = None
    head_width: int | None = None
    start: Path | None = None
    write_with: WriteWith = "auto"
    write_text: WriteText = "auto"
    steps: int | None = 2000
    minutes: float | None = None
    batch: int | None = None
    anchors: int = 48
    lr: float = 2e-3
    decay: float = 0.8
    aim: Aim = "distribution"
    held_out: int | None = None
    seed: int = 0
    dtype: TrainDtype = "bf16"
    device: str = "auto"
    resume: bool = False
    checkpoint_minutes: float = 5.0
    recipe: Recipe = field(default_factory=Recipe)
    revision: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise PassError(f"--lookahead must be 1 to {MAX_LOOKAHEAD}, not {self.lookahead}")
        for name in ("rank", "head_rank", "head_width", "steps", "batch", "anchors", "held_out"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise PassError(
                    f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}"
                )
        if (self.steps is None) == (self.minutes is None):
            raise PassError("give either --steps or --minutes")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise PassError(f"--minutes must be a finite number above 0, not {self.minutes}")
        if self.minutes is not None and self.write_text == "first":
            raise PassError("--write-text first may take any time; leave it out with --minutes")
        if self.minutes is None and self.recipe.sequences is None:
            raise PassError("give --sequences with --steps")
        if (
            self.held_out is not None
            and self.recipe.sequences
            and self.held_out >= self.recipe.sequences
        ):
            raise PassError(
                f"--held-out must leave some of the {self.recipe.sequences} --sequences to train on"
            )
        if not self.adapter_from >= 0:
            raise PassError(f"--adapter-from must be 0 or more, not {self.adapter_from}")
        if not 0 <= self.seed < 2**32:
            raise PassError(f"--seed must be 0 to {2**32 - 1}, not {self.seed}")
        if not 0 < self.lr < math.inf:
            raise PassError(f"--lr must be a finite number above 0, not {self.lr}")
        if not self.checkpoint_minutes >= 0:
            raise PassError(
                f"--checkpoint-minutes must be 0 or more, not {self.checkpoint_minutes}"
            )
        if self.start is not None and not self.start.is_file():
            raise PassError(f"--start {self.start}: there is no such file")
        if not 0 < self.decay <= 1:
            raise PassError(f"--decay must be above 0 and at most 1, not {self.decay}")

    @property
    def sequences_per_process(self) -> int:
        """The value of `batch`, which `run.run` has set if it was None."""
        assert self.batch is not None
        return self.batch

    def resume_settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share. `run.make_checkpoint` adds those of
        the data and of the text writer."""
        values = asdict(self)
        for name in (
            "data",
            "output",
            "device",
            "resume",
            "checkpoint_minutes",
            "write_with",
            "write_text",
        ):
            del values[name]
        if self.revision is None:
            del values["revision"]
        values["start"] = None if self.start is None else self.start.name
        return values
