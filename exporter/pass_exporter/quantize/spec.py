"""What `--weights` names: the schemes of the weights, and whether activations are rounded too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pass_runtime.bundle.manifest import WeightFormat

CodeType = Literal["int4", "int8", "fp8"]
PointKind = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]
"""The four tensors of a decoder layer that linear layers read: see quantize/points.py."""

LARGEST: dict[CodeType, int] = {"int4": 7, "int8": 127, "fp8": 448}
"""The largest signed code."""
LEVELS: dict[CodeType, int] = {"int4": 15, "int8": 255}
"""The largest unsigned code, which schemes with zero points have."""


@dataclass(frozen=True)
class WeightScheme:
    """How a weight [out,in] is stored: as code * scale, or as (code - zero point) * scale.

    block_size: the inputs that share a scale and a zero point; None: all inputs of an output share them.
    zero_points: the codes are unsigned, and each block has a zero point; otherwise codes are signed and symmetric.
    shrink_factors: the factors tried on the scale that just covers a block; the least squared error wins.
    """

    code_type: CodeType
    block_size: int | None = 32
    zero_points: bool = False
    shrink_factors: tuple[float, ...] = (1.0,)

    def fits(self, inputs: int) -> bool:
        """Whether `inputs` fill whole blocks; a layer whose inputs do not keeps the model's dtype."""
        return self.block_size is None or inputs % self.block_size == 0


INT8 = WeightScheme("int8")
INT4 = WeightScheme("int4", shrink_factors=(1.0, 0.95, 0.9, 0.85, 0.8))
INT8_BY_OUTPUT = WeightScheme("int8", block_size=None)
FP8 = WeightScheme("fp8", block_size=None)


@dataclass(frozen=True)
class ActivationScheme:
    """Activations in int8, with a static scale for each quantization point and for what the LM head reads.

    exponent: of SmoothQuant. With every layer of SmolLM2 static, calibration estimates a loss of 0.071 nats per token
    for 0.7, 0.063 for 0.75 and 0.071 for 0.8. budget: the largest loss, in nats per token. The layers that cost most
    are left out until the rest is within it; their activations are not rounded, and their weights have the scheme
    `left_out`.
    """

    exponent: float
    budget: float
    left_out: WeightScheme


STATIC = ActivationScheme(exponent=0.75, budget=0.025, left_out=INT8)


@dataclass(frozen=True)
class QuantSpec:
    """How a trunk's linear layers are quantized. A scheme that is None keeps the model's dtype.

    scheme: of the decoder's layers. lm_head: of the LM head. adapter: of both factors of a look-ahead adapter, which is
    small; a factor that reads what a layer with a static scale reads has that layer's scheme. activations: None leaves
    the activations to the runtime.
    attention_in: of q, k and v, if they differ from the other layers. V has few outputs, and attention passes its
    errors on undiminished (llama.cpp gives it more bits as well). None is `scheme`.
    gptq: weights are rounded with text run through the model (see quantize/gptq.py). keeps_source: layers keep the
    codes that a GGUF file has (see quantize/source.py), and `scheme` and `lm_head` do not apply.
    rounds_activations: the runtime's kernels round activations to 8 bits. A difference in the last bit of a float can
    then become a whole code, so windows must agree bit for bit (see trunk/pad_queries.py).
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
        """Whether quantizing runs text through the model."""
        return self.gptq or self.activations is not None

    def with_zero_points(self) -> QuantSpec:
        """The same with a zero point for every block of `scheme` and `lm_head`."""

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
        QuantSpec("w8a8", INT8_BY_OUTPUT, INT8_BY_OUTPUT, INT8, STATIC, rounds_activations=True),
    )
}
"""By the name that `--weights` takes."""
