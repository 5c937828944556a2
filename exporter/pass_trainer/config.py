"""Holds and checks the options of a training run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.bundle.values import Options, option
from pass_runtime.errors import PassError

AdapterKind = Literal["none", "lora"]
WriteWith = Literal["auto", "torch", "int8"]
WriteText = Literal["auto", "first", "between", "beside"]
TrainDtype = Literal["fp32", "bf16"]
Aim = Literal["distribution", "acceptance", "both"]

HEAD_RANK, HEAD_WIDTH = 96, 384
"""Default sizes of a new draft head. Larger ones cost a CPU more than they gain."""
MAX_HELD_OUT = 32
"""At most so many sequences are held out by default."""


@dataclass(frozen=True)
class Recipe:
    """How sequences are made.

    sequences: how many are made; None: as many as are written until a run with --minutes ends.
    length: N, the most tokens of a sequence, prompt included.
    prompt: the fewest and the most tokens of a prompt that is an excerpt.
    temperatures: shards use them in turn; 0 is greedy.
    chat: the share of excerpts that become a chat message, if the model has a chat template.
    """

    sequences: int | None = 1024
    length: int = 256
    prompt: tuple[int, int] = (16, 64)
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    chat: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        fewest, most = self.prompt
        if not 1 <= fewest <= most < self.length:
            raise PassError(
                f"--prompt-tokens {fewest} {most}: give the fewest, then the most, below "
                "--sequence-length"
            )
        if not 0 <= self.chat <= 1:
            raise PassError(f"--chat-share must be 0 to 1, not {self.chat}")
        if self.sequences is not None and self.sequences < 2:
            raise PassError(f"--sequences must be at least 2, not {self.sequences}")

    @property
    def max_message_tokens(self) -> int:
        """The most tokens of a prompt that is a chat message: half of a sequence."""
        return self.length // 2


@dataclass(frozen=True)
class TrainConfig(Options):
    """Options of a training run. Raises PassError if one is out of range. What the help of a flag
    does not say:

    model, revision: what pass-export takes.
    data: text files, directories or JSON lines from which prompts are taken; `self` lets the model
    write prompts.
    output: the directory of the run.
    adapter: `lora` trains low-rank adapters of `rank` for look-ahead rows, in the layers from
    `adapter_from` on.
    head_rank: the number of columns of the head's token table. A head of `start` that is smaller
    than head_rank and head_width is widened.
    write_with: see `text_supply.text_writer_name`. write_text: see `text_supply`.
    recipe: how training text is made.
    batch: None means `device_sizes.batch_size`.
    aim: see `Drafter.forward`.
    dtype: trained weights are fp32 in any case.
    """

    label_prefix: ClassVar[str] = "--"
    model: str
    data: tuple[Path, ...]
    output: Path
    lookahead: int = option(
        4,
        f"Number of look-ahead rows (L), 1 to {MAX_LOOKAHEAD}.",
        allowed=f"1 to {MAX_LOOKAHEAD}",
        bounds={"ge": 1, "le": MAX_LOOKAHEAD},
    )
    adapter: AdapterKind = option(
        "none", "Adapter for look-ahead rows.", choices=get_args(AdapterKind)
    )
    rank: int = option(32, "Rank of the adapter.", bounds={"ge": 1})
    adapter_from: int = option(0, "First layer with an adapter, from 0.", bounds={"ge": 0})
    head: bool = option(False, "Also train a draft head, which reads the token before each draft.")
    head_rank: int | None = option(
        None,
        "Rank of the head's token table.",
        if_none=f"{HEAD_RANK}; with --start that of its head",
        bounds={"ge": 1},
    )
    head_width: int | None = option(
        None,
        "Size of the head's hidden state.",
        if_none=f"{HEAD_WIDTH}; with --start that of its head",
        bounds={"ge": 1},
    )
    start: Path | None = option(
        None, "Weights to start from; an adapter of higher rank is truncated."
    )
    steps: int | None = option(
        2000,
        "Optimizer steps. With --resume, a larger number extends the run.",
        if_none="2000; with --resume those of the run",
        bounds={"ge": 1},
    )
    minutes: float | None = option(
        None,
        "In place of --steps: the time of the whole run, text and written weights included.",
        allowed="a finite number above 0",
        bounds={"gt": 0, "lt": math.inf},
    )
    batch: int | None = option(
        None,
        "Sequences per step and process.",
        if_none="1; on a GPU as many as fit, at most 64",
        bounds={"ge": 1},
    )
    anchors: int = option(
        48, "Tokens per sequence after which drafts are trained.", bounds={"ge": 1}
    )
    lr: float = option(
        2e-3,
        "Learning rate of adapter and head; that of the embeddings is 10 times as high.",
        allowed="a finite number above 0",
        bounds={"gt": 0, "lt": math.inf},
    )
    decay: float = option(
        0.8,
        "Loss weight of a draft relative to the draft before it.",
        allowed="above 0 and at most 1",
        bounds={"gt": 0, "le": 1},
    )
    aim: Aim = option(
        "distribution",
        "The loss. distribution: KL divergence from the model's distributions. acceptance: mostly "
        "the probability that a draft is rejected. both: distribution for 70 % of the run, then "
        "acceptance.",
        choices=get_args(Aim),
    )
    held_out: int | None = option(
        None,
        "Number of sequences to measure and not to train on.",
        if_none=f"one in 16, at most {MAX_HELD_OUT}",
        bounds={"ge": 1},
    )
    write_with: WriteWith = option(
        "auto",
        "What writes training text: torch, or the model's int8 bundle. auto: int8 on a CPU with "
        "one process, else torch.",
        choices=get_args(WriteWith),
    )
    write_text: WriteText = option(
        "auto",
        "When training text is written: first (before the first step), between steps, or beside "
        "training, by another process. auto: beside on a GPU; on a CPU first, or between with "
        "--minutes.",
        choices=get_args(WriteText),
    )
    seed: int = option(
        0,
        "Seed of training text, weights and batches.",
        allowed=f"0 to {2**32 - 1}",
        bounds={"ge": 0, "lt": 2**32},
    )
    dtype: TrainDtype = option("bf16", "Dtype of the frozen model.", choices=get_args(TrainDtype))
    device: str = option("auto", "auto, cpu or cuda.")
    resume: bool = option(False, "Continue from the last checkpoint in --output, if there is one.")
    checkpoint_minutes: float = option(
        5.0,
        "Time between checkpoints; with --minutes at most a tenth of that time.",
        bounds={"ge": 0},
    )
    recipe: Recipe = field(default_factory=Recipe)
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.minutes is None):
            raise PassError("give either --steps or --minutes")
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
        if self.start is not None and not self.start.is_file():
            raise PassError(f"--start {self.start}: there is no such file")

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
