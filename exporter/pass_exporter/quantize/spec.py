"""The specs that `--weights` selects by name: how weights are quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pass_runtime.bundle.manifest import WeightFormat

CodeType = Literal["int4", "int5", "int8", "fp8"]

MAX_SIGNED_CODE: dict[CodeType, int] = {"int4": 7, "int5": 15, "int8": 127, "fp8": 448}
"""The largest signed code. Those of fp8 are floats."""
MAX_UNSIGNED_CODE: dict[CodeType, int] = {"int4": 15, "int5": 31, "int8": 255}
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

    @property
    def stored(self) -> WeightScheme:
        """The scheme of the codes in a bundle: 5 bits are stored as 8."""
        return replace(self, code_type="int8") if self.code_type == "int5" else self


INT8 = WeightScheme("int8")
INT5 = WeightScheme("int5", shrink_factors=(1.0, 0.95, 0.9, 0.85))
"""For layers that need more than 4 bits."""
INT4 = WeightScheme("int4", shrink_factors=(1.0, 0.95, 0.9, 0.85, 0.8))
FP8 = WeightScheme("fp8", block_size=None)


@dataclass(frozen=True)
class QuantSpec:
    """How a trunk's linear layers are quantized. Weights whose scheme is None keep their dtype.

    scheme: the scheme of the decoder's layers.
    lm_head: the scheme of the LM head.
    adapter: the scheme of the adapter's factors A and B.
    attention_in: the scheme of the layers q, k and v; None means `scheme`. Attention does not
    reduce the errors of V, so v may need more bits (llama.cpp gives v more, too).
    fine: the scheme of layers for which 4 bits are too few.
    gptq: whether weights are rounded by GPTQ, which runs text through the model (see
    quantize/gptq.py).
    keeps_codes: whether layers of a .gguf file keep its codes (see quantize/gguf_codes.py).
    keeps_offsets: whether they also do if the codes have offsets.
    """

    name: WeightFormat
    scheme: WeightScheme | None = None
    lm_head: WeightScheme | None = None
    adapter: WeightScheme | None = None
    attention_in: WeightScheme | None = None
    fine: WeightScheme = INT8
    gptq: bool = False
    keeps_codes: bool = False
    keeps_offsets: bool = False

    def with_zero_points(self) -> QuantSpec:
        """Return a copy in which every block of `scheme` and `lm_head` has a zero point."""

        def changed(scheme: WeightScheme | None) -> WeightScheme | None:
            return None if scheme is None else replace(scheme, zero_points=True)

        return replace(self, scheme=changed(self.scheme), lm_head=changed(self.lm_head))


SPECS: dict[str, QuantSpec] = {
    spec.name: spec
    for spec in (
        QuantSpec("full"),
        QuantSpec("int8", INT8, INT8, INT8, keeps_codes=True),
        QuantSpec("int4", INT4, INT4, INT8, INT8, fine=INT5, gptq=True, keeps_codes=True),
        QuantSpec("fp8", FP8, FP8, INT8),
    )
}
"""Specs by the name that `--weights` takes."""
