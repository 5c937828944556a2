"""The specs that `--weights` selects by name: how weights and activations are quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pass_runtime.bundle.manifest import WeightFormat

CodeType = Literal["int4", "int8", "fp8"]
PointKind = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]
"""The kinds of quantization points in a decoder layer: see quantize/points.py."""

MAX_SIGNED_CODE: dict[CodeType, int] = {"int4": 7, "int8": 127, "fp8": 448}
"""The largest signed code. Those of fp8 are floats."""
MAX_UNSIGNED_CODE: dict[CodeType, int] = {"int4": 15, "int8": 255}
"""The largest unsigned code. Schemes with zero points use unsigned codes."""


@dataclass(frozen=True)
class WeightScheme:
    """How a weight [out,in] is stored: as code * scale, or as (code - zero point) * scale.

    block_size: number of inputs that share a scale and a zero point; None if all inputs of an
    output share them.
    zero_points: if True, codes are unsigned and each block has a zero point; otherwise codes are
    signed and symmetric.
    shrink_factors: factors to try on the scale that just covers a block's values. Each block gets
    the one with the least squared error.
    """

    code_type: CodeType
    block_size: int | None = 32
    zero_points: bool = False
    shrink_factors: tuple[float, ...] = (1.0,)

    def fits(self, inputs: int) -> bool:
        """Whether the block size divides a layer's `inputs`. If not, the layer is not quantized."""
        return self.block_size is None or inputs % self.block_size == 0


INT8 = WeightScheme("int8")
INT4 = WeightScheme("int4", shrink_factors=(1.0, 0.95, 0.9, 0.85, 0.8))
INT8_BY_OUTPUT = WeightScheme("int8", block_size=None)
FP8 = WeightScheme("fp8", block_size=None)


@dataclass(frozen=True)
class ActivationScheme:
    """How activations are rounded to int8 codes, with a static scale for each quantization point.

    exponent: SmoothQuant's alpha (see quantize/smooth.py). If no point of SmolLM2 is left out, the
    estimated loss is 0.071 nats per token for 0.7, 0.063 for 0.75 and 0.071 for 0.8.
    budget: the largest estimated loss to accept, in nats per token. Points are left out, those with
    the largest losses first, until the losses of the others are within the budget. A point that is
    left out has no static scale: its activations are not rounded.
    left_out_weights: the scheme of the layers that read such a point.
    """

    exponent: float
    budget: float
    left_out_weights: WeightScheme


STATIC_INT8 = ActivationScheme(exponent=0.75, budget=0.025, left_out_weights=INT8)


@dataclass(frozen=True)
class QuantSpec:
    """How a trunk's linear layers are quantized. Weights whose scheme is None keep their dtype.

    scheme: the scheme of the decoder's layers.
    lm_head: the scheme of the LM head.
    adapter: the scheme of the adapter's factors A and B. A factor A reads its layer's input; if
    this input has a static scale, A gets `scheme` instead.
    activations: the scheme of static int8 activations; None if the runtime chooses how precise
    activations are.
    attention_in: the scheme of the layers q, k and v; None means `scheme`. Attention does not
    reduce the errors of V, so v may need more bits (llama.cpp gives v more, too).
    gptq: whether weights are rounded by GPTQ, which runs text through the model (see
    quantize/gptq.py).
    keeps_source: whether layers keep the codes of a GGUF file (see quantize/source.py) in place of
    `scheme` and `lm_head`.
    rounds_activations: whether the runtime's kernels round activations to 8 bits. A difference in
    the last bit of a float can then change a code by one, so windows of all widths must give the
    same bits (see trunk/pad_queries.py).
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

        def changed(scheme: WeightScheme | None) -> WeightScheme | None:
            return None if scheme is None else replace(scheme, zero_points=True)

        return replace(self, scheme=changed(self.scheme), lm_head=changed(self.lm_head))


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
