from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from pass_trainer.config import Recipe, TrainConfig


class Silent:
    def phase(self, _name: str):
        return lambda _done, _total, _note="": None


class Interrupted(Silent):
    """Raises KeyboardInterrupt at the end of step `steps` + 1 of this process."""

    def __init__(self, steps: int) -> None:
        self._steps_left = steps

    def phase(self, name: str):
        def step(_done: int, _total: int, _note: str = "") -> None:
            self._steps_left -= name == "training"
            if self._steps_left < 0:
                raise KeyboardInterrupt

        return step


def small_run(model: Path, text: Path, output: Path) -> TrainConfig:
    """30 steps on 64 sequences, whose prompts are from `text`."""
    if not text.exists():
        text.write_text(
            "".join(f"line {i}: the quick brown fox has {i * i} friends\n" for i in range(400))
        )
    recipe = Recipe(sequences=64, sequence_length=48, prompt_tokens=(4, 8), chat_share=0.0)
    sizes = {"lookahead": 3, "rank": 4, "steps": 30, "batch": 2, "anchors": 12}
    formats = {"adapter": "lora", "dtype": "fp32", "device": "cpu", "write_with": "torch"}
    return TrainConfig(str(model), (text,), output, recipe=recipe, **formats, **sizes)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "lookahead.safetensors")


def equal_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
