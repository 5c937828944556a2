"""What an export is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pass_runtime.errors import PassError
from pass_runtime.plan import MAX_LOOKAHEAD
from pass_runtime.sampling import RULES, Rule

Dtype = Literal["fp32", "fp16"]
DTYPES: tuple[Dtype, ...] = ("fp32", "fp16")
Weights = Literal["full", "int8", "int4"]
WEIGHTS: tuple[Weights, ...] = ("full", "int8", "int4")


@dataclass(frozen=True)
class ExportConfig:
    """model: registry name, hub id, local directory or .gguf file. lookahead: L, the most drafts per round.

    lookahead_weights: a safetensors file with `lookahead` [>=L,hidden], or `mean` for the untrained baseline; None
    takes the weights that are shipped for the model, else the baseline.
    weights: "full" keeps the dtype; "int8" and "int4" quantize every linear layer's weight in blocks (see quantize.py).
    rule: "match" accepts a draft where it equals the model's own sample, so that the text is that of plain decoding;
    "rejection" is the paper's: it accepts more sampled drafts, and only the distribution stays the same.
    verify: a text file to measure perplexity and greedy agreement with the full-precision model on.
    output: the bundle directory; None names it after the model. force: replace a bundle that is there.
    """

    model: str
    lookahead: int = 4
    lookahead_weights: Path | None = None
    output: Path | None = None
    dtype: Dtype = "fp32"
    weights: Weights = "full"
    rule: Rule = "match"
    verify: Path | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.lookahead <= MAX_LOOKAHEAD:
            raise PassError(f"--lookahead must be 1 to {MAX_LOOKAHEAD}, not {self.lookahead}")
        if self.dtype not in DTYPES:
            raise PassError(f"--dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.rule not in RULES:
            raise PassError(f"--rule must be one of {', '.join(RULES)}, not {self.rule!r}")
        if self.weights not in WEIGHTS:
            raise PassError(f"--weights must be one of {', '.join(WEIGHTS)}, not {self.weights!r}")
