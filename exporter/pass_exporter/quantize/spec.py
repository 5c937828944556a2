"""The quantization schemes that `--weights` selects, for weights and activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pass_runtime.bundle.manifest import WeightFormat

CodeType = Literal["int4", "int8", "fp8"]
PointKind = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]
"""The four inputs of a decoder layer's linear layers: see quantize/points.py."""

MAX_SIGNED_CODE: dict[CodeType, int] = {"int4": 7, "int8": 127, "fp8": 448}
"""The largest signed code."""
MAX_UNSIGNED_CODE: dict[CodeType, int] = {"int4": 15, "int8": 255}
"""The largest unsigned code. Schemes with zero points use unsigned codes."""


@dataclass(frozen=True)
class WeightScheme:
    """How a weight [out,in] is stored: as code * scale, or as (code - zero point) * scale.

    block_size: number of inputs that share a scale and a zero point; None if all inputs of an
    output share them.
    zero_points: if True, codes are unsigned and each block has a zero point; otherwise codes are
    signed and symmetric.
    shrink_factors: each is tried on the scale that just covers a block; the one with the least
    squared error is used.
    """

    code_type: CodeType
    block_size: int | None = 32
    zero_points: bool = False
    shrink_factors: tuple[float, ...] = (1.0,)

    def fits(self, inputs: int) -> bool:
        """Whether `inputs` is a multiple of the block size. Other layers keep their dtype."""
        return self.block_size is None or inputs % self.block_size == 0


INT8 = WeightScheme("int8")
INT4 = WeightScheme("int4", shrink_factors=(1.0, 0.95, 0.9, 0.85, 0.8))
INT8_BY_OUTPUT = WeightScheme("int8", block_size=None)
FP8 = WeightScheme("fp8", block_size=None)


@dataclass(frozen=True)
class ActivationScheme:
    """Activations in int8, a static scale for each quantization point and the LM head's input.

    exponent: SmoothQuant's alpha. With every layer of SmolLM2 static, calibration estimates a loss
    of 0.071 nats per token for 0.7, 0.063 for 0.75 and 0.071 for 0.8.
    budget: the largest accepted loss, in nats per token. Quantization points are left out, the most
    costly first, until the others fit the budget. The activations of a point that is left out are
    not rounded.
    left_out_weights: the scheme of the weights that read such a point.
    """

    exponent: float
    budget: float
    left_out_weights: WeightScheme


STATIC_INT8 = ActivationScheme(exponent=0.75, budget=0.025, left_out_weights=INT8)


@dataclass(frozen=True)
class QuantSpec:
    """How a trunk's linear layers are quantized. A scheme that is None keeps the model's dtype.

    scheme: for the decoder's layers.
    lm_head: for the LM head.
    adapter: for both factors of a look-ahead adapter. A factor that shares its input, and so its
    static scale, with a layer gets that layer's scheme instead.
    activations: static int8 activations; None if the runtime chooses their precision.
    attention_in: for q, k and v; None means `scheme`. Errors of V reach the attention output
    undiminished, so it can need more bits (llama.cpp gives it more as well).
    gptq: round weights by GPTQ, which runs text through the model (see quantize/gptq.py).
    keeps_source: layers keep the codes of a GGUF file (see quantize/source.py); `scheme` and
    `lm_head` do not apply.
    rounds_activations: the runtime's kernels round activations to 8 bits. A difference in the last
    bit of a float can then change a code by one, so windows of all widths must agree bit for bit
    (see trunk/pad_queries.py).
    """

    name: WeightFormat
    scheme: WeightScheme | None = None
    lm_head: WeightScheme | None = None
    adapter: WeightScheme | None = None
    activations: ActivationScheme | None = None
    attention_in: WeightScheme | None = None
    gptq: bool = False
    keeps_source: bool = False
    rounds_activations: bool = False

    @property
    def reads_text(self) -> bool:
        """Whether quantization runs calibration text through the model."""
        return self.gptq or self.activations is not None

    def with_zero_points(self) -> QuantSpec:
        """Return a copy in which every block of `scheme` and `lm_head` has a zero point."""

        def asymmetric(scheme: WeightScheme | None) -> WeightScheme | None:
            return None if scheme is None else replace(scheme, zero_points=True)

        return replace(self, scheme=asymmetric(self.scheme), lm_head=asymmetric(self.lm_head))


SPECS: dict[str, QuantSpec] = {
    spec.name: spec
    for spec in (
        QuantSpec("full"),
        QuantSpec("int8", INT8, INT8, INT8, rounds_activations=True),
        QuantSpec("int4", INT4, INT4, INT8, attention_in=INT8, gptq=True, rounds_activations=True),
        QuantSpec("source", INT8, INT8, INT8, keeps_source=True, rounds_activations=True),
        QuantSpec("fp8", FP8, FP8, INT8),
        QuantSpec(
            "w8a8", INT8_BY_OUTPUT, INT8_BY_OUTPUT, INT8, STATIC_INT8, rounds_activations=True
        ),
    )
}
"""Specs by the name that `--weights` takes."""
