"""What a training run is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.errors import PassError
from pass_trainer.distill import Recipe

AdapterKind = Literal["none", "lora"]
ADAPTERS: tuple[AdapterKind, ...] = ("none", "lora")

WriteWith = Literal["auto", "torch", "w8a8"]
WRITERS: tuple[WriteWith, ...] = ("auto", "torch", "w8a8")

TrainDtype = Literal["fp32", "bf16"]
TRAIN_DTYPES: tuple[TrainDtype, ...] = ("bf16", "fp32")


@dataclass(frozen=True)
class TrainConfig:
    """model: as for pass-export. data: files, directories or JSON lines with text to take prompts from, or `self`.

    lookahead: L, embeddings to train. adapter: low-rank adapters of `rank` on look-ahead rows, or none; from layer
    `adapter_from` on.
    head: also a draft head, with a table of `head_rank` numbers by token and `head_width` in its state.
    start: a weights file to go on from; its adapter is cut down to `rank`. write_with: who writes the training text.
    steps: optimizer steps. batch: sequences per step and process. anchors: places per sequence to draft from.
    lr: of the adapter; the embeddings learn ten times as fast. decay: weight of a draft against the one before it.
    dtype: of the frozen model; what is trained stays in fp32. checkpoint_minutes: between checkpoints.
    """

    model: str
    data: tuple[Path, ...]
    output: Path
    lookahead: int = 4
    adapter: AdapterKind = "none"
    rank: int = 32
    adapter_from: int = 0
    head: bool = False
    head_rank: int = 96
    head_width: int = 384
    start: Path | None = None
    write_with: WriteWith = "auto"
    steps: int = 2000
    batch: int = 1
    anchors: int = 48
    lr: float = 2e-3
    decay: float = 0.8
    seed: int = 0
    dtype: TrainDtype = "bf16"
    device: str = "auto"
    resume: bool = False
    checkpoint_minutes: float = 5.0
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise PassError(f"--lookahead must be 1 to {MAX_LOOKAHEAD}, not {self.lookahead}")
        for name in ("rank", "head_rank", "head_width", "steps", "batch", "anchors"):
            if getattr(self, name) < 1:
                raise PassError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if not self.lr > 0:
            raise PassError(f"--lr must be greater than 0, not {self.lr}")
        if not 0 < self.decay <= 1:
            raise PassError(f"--decay must be above 0 and at most 1, not {self.decay}")

    def what_is_trained(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON has them; a resumed run must have the same."""
        values = asdict(self)
        for name in ("data", "output", "device", "resume", "checkpoint_minutes", "write_with"):
            del values[name]
        values["start"] = None if self.start is None else self.start.name
        return values
