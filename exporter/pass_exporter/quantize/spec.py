"""How `--weights` quantizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pass_runtime.bundle.manifest import WeightFormat

CodeType = Literal["int4", "int5", "int8", "fp8"]

MAX_SIGNED_CODE: dict[CodeType, int] = {"int4": 7, "int5": 15, "int8": 127, "fp8": 448}
MAX_UNSIGNED_CODE: dict[CodeType, int] = {"int4": 15, "int5": 31, "int8": 255}


@dataclass(frozen=True)
class WeightScheme:
    """How a weight [out,in] is stored: code * scale, or (code - zero point) * scale. block_size:
    inputs that share a scale; None if all do. shrink_factors: factors to try on the scale that just
    covers a block."""

    code_type: CodeType
    block_size: int | None = 32
    zero_points: bool = False
    shrink_factors: tuple[float, ...] = (1.0,)

    @property
    def stored(self) -> WeightScheme:
        """5 bits are stored as 8."""
        return replace(self, code_type="int8") if self.code_type == "int5" else self


INT8 = WeightScheme("int8")
INT5 = WeightScheme("int5", shrink_factors=(1.0, 0.95, 0.9, 0.85))
"""For layers that need more than 4 bits."""
INT4 = WeightScheme("int4", shrink_factors=(1.0, 0.95, 0.9, 0.85, 0.8))
FP8 = WeightScheme("fp8", block_size=None)


@dataclass(frozen=True)
class QuantSpec:
    """Schemes; a weight whose scheme is None keeps its dtype. attention_in: of q, k and v, whose
    errors attention does not reduce (llama.cpp gives v more bits, too). fine: for layers that need
    more than 4 bits. keeps_codes: keep a .gguf file's; keeps_offsets: also with offsets."""

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
