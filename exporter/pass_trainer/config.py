"""Holds and checks the options of a training run."""

from __future__ import annotations

from dataclasses import asdict, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pass_runtime.bundle.option import option, options_class
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.window import MAX_LOOKAHEAD
from pass_runtime.errors import PassError
from pass_runtime.measuring.real_use import KINDS, read_prompt_set

AdapterKind = Literal["none", "lora"]
WriteWith = Literal["auto", "torch", "int8"]
TrainDtype = Literal["fp32", "bf16"]
Aim = Literal["acceptance", "distribution"]

HEAD_RANK, HEAD_WIDTH = 96, 384
"""Default sizes of a new draft head. Larger ones cost a CPU more than they gain."""
MAX_HELD_OUT = 32
"""At most so many sequences are held out by default."""
LOOKAHEAD_HELP = f"Number of look-ahead rows (L), 1 to {MAX_LOOKAHEAD}."
DEVICE_HELP = "auto, cpu or cuda."
PROMPTS = Path(__file__).with_name("prompts") / "evaluation.jsonl"


@options_class
class Recipe:
    """How sequences are made. prompt_tokens: the fewest and the most tokens of an excerpt.
    temperatures: of shards, in turn."""

    label_prefix: ClassVar[str] = "--"
    sequences: int | None = option(
        1024,
        "Number of sequences of training text.",
        if_none="1024; with --minutes as many as the model writes",
        ge=2,
    )
    sequence_length: int = option(256, "Tokens per sequence, including its prompt.")
    prompt_tokens: tuple[int, int] = (16, 64)
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    chat_share: float = option(0.25, "Share of excerpts that become a chat message.", ge=0, le=1)
    seed: int = 0

    def __post_init__(self) -> None:
        fewest, most = self.prompt_tokens
        if not 1 <= fewest <= most < self.sequence_length:
            raise PassError(
                f"--prompt-tokens {fewest} {most}: give the fewest, then the most, below "
                "--sequence-length"
            )
        for temperature in self.temperatures:
            if not 0 <= temperature < 100:
                raise PassError(f"--temperatures must be 0 to below 100, not {temperature}")

    @property
    def max_message_tokens(self) -> int:
        """The most tokens of a prompt that is a chat message: half of a sequence."""
        return self.sequence_length // 2


@options_class
class TrainConfig:
    """Options of a training run. Raises PassError if one is out of range. dtype: of the frozen
    model; trained weights are fp32 in any case."""

    label_prefix: ClassVar[str] = "--"
    model: str
    data: tuple[Path, ...]
    output: Path
    lookahead: int = option(4, LOOKAHEAD_HELP, ge=1, le=MAX_LOOKAHEAD)
    adapter: AdapterKind = option("none", "Adapter for look-ahead rows.")
    rank: int = option(32, "Rank of the adapter.", ge=1)
    adapter_from: int = option(0, "First layer with an adapter, from 0.", ge=0)
    head: bool = option(False, "Also train a draft head, which reads the token before each draft.")
    head_rank: int | None = option(
        None,
        "Rank of the head's token table.",
        if_none=f"{HEAD_RANK}; with --start that of its head",
        ge=1,
    )
    head_width: int | None = option(
        None,
        "Size of the head's hidden state.",
        if_none=f"{HEAD_WIDTH}; with --start that of its head",
        ge=1,
    )
    start: Path | None = option(
        None, "Weights to start from; an adapter of higher rank is truncated."
    )
    steps: int | None = option(
        2000,
        "Optimizer steps. With --resume, a larger number extends the run.",
        if_none="2000; with --resume those of the run",
        ge=1,
    )
    minutes: float | None = option(
        None,
        "In place of --steps: the time of the whole run, text and written weights included.",
        allowed="a finite number above 0",
        gt=0,
    )
    batch: int | None = option(
        None,
        "Sequences per step and process.",
        if_none="1; on a GPU as many as fit, at most 64",
        ge=1,
    )
    anchors: int = option(48, "Tokens per sequence after which drafts are trained.", ge=1)
    lr: float = option(
        2e-3,
        "Learning rate of the head and an adapter's A. A new adapter's B has 8 times this rate, "
        "the embeddings 10 times.",
        allowed="a finite number above 0",
        gt=0,
    )
    decay: float = option(
        0.8,
        "Loss weight of a draft relative to the draft before it.",
        allowed="above 0 and at most 1",
        gt=0,
        le=1,
    )
    aim: Aim = option(
        "acceptance",
        "The loss. acceptance: mostly the probability that a draft is rejected. distribution: KL "
        "divergence from the model's distributions, and the head's cross-entropy.",
    )
    held_out: int | None = option(
        None,
        "Number of sequences to measure and not to train on.",
        if_none=f"one in 16, at most {MAX_HELD_OUT}",
        ge=1,
    )
    write_with: WriteWith = option(
        "auto",
        "What writes training text: torch, or the model's int8 bundle. auto: int8 on a CPU with "
        "one process, else torch.",
    )
    seed: int = option(
        0,
        "Seed of training text, weights and batches.",
        allowed=f"0 to {2**32 - 1}",
        ge=0,
        lt=2**32,
    )
    dtype: TrainDtype = option("bf16", "Dtype of the frozen model.")
    device: str = option("auto", DEVICE_HELP)
    resume: bool = option(False, "Continue from the last checkpoint in --output, if there is one.")
    checkpoint_minutes: float = option(
        5.0,
        "Time between checkpoints; with --minutes at most a tenth of that time.",
        ge=0,
    )
    recipe: Recipe = field(default_factory=Recipe)
    revision: str | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise PassError("give either --steps or --minutes")
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
        """`batch`, which `run.run` has set if it was None."""
        assert self.batch is not None
        return self.batch

    def resume_settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share, without data and text writer."""
        values = asdict(self)
        for name in ("data", "output", "device", "resume", "checkpoint_minutes", "write_with"):
            del values[name]
        if self.revision is None:
            del values["revision"]
        values["start"] = None if self.start is None else self.start.name
        return values


@options_class
class EvaluateConfig:
    """Options of an evaluation. Raises PassError if one is out of range. weights: a file that
    pass-train wrote; None for the untrained baseline."""

    label_prefix: ClassVar[str] = "--"
    model: str
    weights: Path | None = None
    prompts: Path = PROMPTS
    tokens: int = option(128, "Tokens to measure per answer.", ge=2)
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    top_k: int = option(0, "Top-k of sampled answers; 0 is off.")
    lookahead: int = option(4, LOOKAHEAD_HELP, ge=1, le=MAX_LOOKAHEAD)
    kinds: tuple[str, ...] = KINDS
    each: int | None = option(None, "Number of prompts of each kind.", if_none="all", ge=1)
    dtype: TrainDtype = option("fp32", "Dtype of the model.")
    device: str = option("auto", DEVICE_HELP)
    revision: str | None = None

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            SamplingParams(temperature, self.top_k)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "weights": None if self.weights is None else str(self.weights),
            "prompts": len(read_prompt_set(self.prompts, self.kinds, self.each)),
            "tokens": self.tokens,
            "top_k": self.top_k,
            "lookahead": self.lookahead,
            "dtype": self.dtype,
        }
