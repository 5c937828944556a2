"""What `--weights` names: the grids that weights are rounded to, and whether activations are rounded too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pass_runtime.bundle.manifest import WeightFormat

Numbers = Literal["int4", "int8", "fp8"]
Kind = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]
"""What a tensor is that linear layers read: see quantize/sites.py."""

LARGEST: dict[Numbers, int] = {"int4": 7, "int8": 127, "fp8": 448}
LEVELS: dict[Numbers, int] = {"int4": 15, "int8": 255}
"""With zero points: the largest of the unsigned numbers."""


@dataclass(frozen=True)
class Grid:
    """The values a weight [out,in] may have: number * scale, or (number - zero point) * scale.

    block: inputs that share a scale and a zero point; None is all of an output's. zero_points: numbers are unsigned,
    else they are signed and 0 is 0. shrinks: scales tried, in parts of the one that just covers a block; the least
    squared error wins.
    """

    numbers: Numbers
    block: int | None = 32
    zero_points: bool = False
    shrinks: tuple[float, ...] = (1.0,)

    def fits(self, inputs: int) -> bool:
        """Whether a layer of so many inputs fills whole blocks; one that does not keeps the model's dtype."""
        return self.block is None or inputs % self.block == 0


INT8 = Grid("int8")
INT4 = Grid("int4", shrinks=(1.0, 0.95, 0.9, 0.85, 0.8))
INT8_BY_OUTPUT = Grid("int8", block=None)
FP8 = Grid("fp8", block=None)


@dataclass(frozen=True)
class Activations:
    """8-bit integers with a static scale for each tensor that linear layers read.

    exponent: of SmoothQuant; with all of SmolLM2's layers static, calibration estimates a loss of 0.071 nats per token
    for 0.7, 0.063 for 0.75 and 0.071 for 0.8. budget: the most of it; the layers that cost most keep their activations,
    and have weights on the grid `otherwise`.
    """

    exponent: float
    budget: float
    otherwise: Grid


STATIC = Activations(exponent=0.75, budget=0.025, otherwise=INT8)


@dataclass(frozen=True)
class QuantSpec:
    """How a trunk's linear layers are quantized.

    grid: of the decoder's layers; lm_head, adapter: of the LM head and of both factors of a look-ahead adapter, which
    is small; None keeps the model's dtype. activations: None leaves them to the runtime.
    sensitive: of the decoder's layers that read what attention does: V has few outputs, and its errors pass through
    attention undiminished (llama.cpp gives it more bits as well). None is `grid`.
    compensated: rounded with the text that they read in mind (see quantize/gptq.py). keeps_source: layers are on the
    grids that a GGUF file has them on (see quantize/source.py), in place of `grid` and `lm_head`.
    rounds_activations: the runtime's kernels round activations to 8 bits, so that a difference in the last bit of a
    float can become one of a whole step: windows must agree bit for bit (see trunk/pad_queries.py).
    """

    name: WeightFormat
    grid: Grid | None = None
    lm_head: Grid | None = None
    adapter: Grid | None = None
    activations: Activations | None = None
    sensitive: Grid | None = None
    compensated: bool = False
    keeps_source: bool = False
    rounds_activations: bool = False

    @property
    def reads_text(self) -> bool:
        """Whether it takes text to quantize."""
        return self.compensated or self.activations is not None

    def with_zero_points(self) -> QuantSpec:
        """The same with a zero point for every block of integers, adapter apart."""

        def free(grid: Grid | None) -> Grid | None:
            return None if grid is None else replace(grid, zero_points=True)

        return replace(self, grid=free(self.grid), lm_head=free(self.lm_head))


SPECS: dict[str, QuantSpec] = {
    spec.name: spec
    for spec in (
        QuantSpec("full"),
        QuantSpec("int8", INT8, INT8, INT8, rounds_activations=True),
        QuantSpec("int4", INT4, INT4, INT8, sensitive=INT8, compensated=True, rounds_activations=True),
        QuantSpec("source", INT8, INT8, INT8, keeps_source=True, rounds_activations=True),
        QuantSpec("fp8", FP8, FP8, INT8),
        QuantSpec("w8a8", INT8_BY_OUTPUT, INT8, INT8, STATIC, rounds_activations=True),
    )
}
"""By the name that `--weights` takes."""
