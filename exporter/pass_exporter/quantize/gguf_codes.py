"""Reads the codes of a .gguf file, which layers keep. Types in FORMATS have a scale and perhaps an
offset per 32 inputs, as bundles do. K-quants' scales and offsets are products, rounded to float16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import Q4_K
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from pass_exporter.model.gguf_reader import read_gguf
from pass_exporter.quantize.rounding import QuantizedWeight, chunks, pack
from pass_exporter.quantize.spec import INT4, INT8, WeightScheme
from pass_exporter.quantize.weights import LM_HEAD
from pass_runtime.errors import PassError

TOLERANCE = 2**-6
"""Of values that transformers reads, relative to the largest. Only rounding scales changes less."""
Bytes = npt.NDArray[np.uint8]
Blocks = tuple[Bytes, npt.NDArray[np.float32], npt.NDArray[np.float32] | None]
"""Unsigned codes [n,inputs], scales, and offsets or None [n,inputs / 32]."""


@dataclass(frozen=True)
class Format:
    """middle: the unsigned code that stands for 0, None if blocks have offsets."""

    scheme: WeightScheme
    middle: int | None
    read: Callable[[Bytes], Blocks]


def _parts(blocks: Bytes, *sizes: int) -> list[Bytes]:
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _floats(data: Bytes) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _halves(data: Bytes, size: int) -> Bytes:
    shifts = np.array([[0], [4]], np.uint8)
    halves: Bytes = (data.reshape(len(data), -1, 1, size) >> shifts) & np.uint8(15)
    return halves.reshape(len(data), -1)


def _blocks_of_32(blocks: Bytes, *, offsets: bool = False, fifth_bits: bool = False) -> Blocks:
    scale, offset, bits, packed = _parts(blocks, 2, 2 * offsets, 4 * fifth_bits)
    codes = _halves(packed, 16)
    if fifth_bits:
        codes |= np.unpackbits(bits, axis=1, bitorder="little") << np.uint8(4)
    return codes, _floats(scale), _floats(offset) if offsets else None


def _bytes_of_32(blocks: Bytes) -> Blocks:
    scale, codes = _parts(blocks, 2)
    return codes + np.uint8(128), _floats(scale), None


def _blocks_of_256(blocks: Bytes, *, fifth_bits: bool = False) -> Blocks:
    scale, offset, by_block, bits, packed = _parts(blocks, 2, 2, 12, 32 * fifth_bits)
    codes = _halves(packed, 32)
    if fifth_bits:
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        fifth = ((bits[:, None] >> shifts) & np.uint8(1)).reshape(len(bits), -1)
        codes |= fifth << np.uint8(4)
    scales, offsets = Q4_K.get_scale_min(by_block)
    return codes, _floats(scale) * scales, -_floats(offset) * offsets


UINT4 = replace(INT4, zero_points=True)
FORMATS = {
    "Q4_0": Format(INT4, 8, _blocks_of_32),
    "Q4_1": Format(UINT4, None, partial(_blocks_of_32, offsets=True)),
    "Q4_K": Format(UINT4, None, _blocks_of_256),
    "Q5_0": Format(INT8, 16, partial(_blocks_of_32, fifth_bits=True)),
    "Q5_1": Format(INT8, None, partial(_blocks_of_32, offsets=True, fifth_bits=True)),
    "Q5_K": Format(INT8, None, partial(_blocks_of_256, fifth_bits=True)),
    "Q8_0": Format(INT8, 128, _bytes_of_32),
}
"""Types whose codes can be kept. Signed codes of 8 bits have room for 5."""
FLOATS = ("F32", "F16", "BF16")


class GgufCodes:
    """The tensors of the .gguf file that `model` was loaded from."""

    def __init__(self, path: Path, model: PreTrainedModel, *, with_offsets: bool) -> None:
        reader = read_gguf(path)
        arch = str(reader.key("general.architecture"))
        self._tensors: Mapping[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self._names = reader.tensor_names(model)
        # transformers' own, which puts the rows of some tensors into another order.
        self._processor = TENSOR_PROCESSORS.get(arch, TensorProcessor)(model.config.to_dict())
        self._with_offsets = with_offsets

    def scheme(self, layer: str, default: WeightScheme, fine: WeightScheme) -> WeightScheme:
        """Return the scheme for a layer whose codes are not kept. fine: for more than 4 bits in the
        file."""
        kind = self._tensor(layer).tensor_type.name
        form = FORMATS.get(kind)
        coarse = form is not None and form.scheme.code_type == "int4"
        return default if kind in FLOATS or coarse else fine

    def is_finer(self, layer: str, scheme: WeightScheme) -> bool:
        """Whether the file's codes of a layer have more bits than those of `scheme`."""
        return self._tensor(layer).tensor_type.name == "Q8_0" and scheme.code_type != "int8"

    def codes(self, layer: str, weight: torch.Tensor) -> QuantizedWeight | None:
        """Return the codes of a layer; None if its type has none that can be kept. Raises PassError
        if they differ from `weight` [out,in], which transformers has read."""
        tensor = self._tensor(layer)
        kind = tensor.tensor_type.name
        if kind not in FORMATS or (FORMATS[kind].middle is None and not self._with_offsets):
            return None
        rows = np.arange(len(tensor.data))
        order = self._processor.process(rows, tensor.name).weights
        kept = read_codes(kind, tensor.data if order is rows else tensor.data[order], weight.dtype)
        if kept is None:
            return None
        values, limit = kept.dequantized(), TOLERANCE * float(weight.abs().max())
        if not all(
            torch.allclose(values[part], weight[part], rtol=0, atol=limit)
            for part in chunks(*weight.shape)
        ):
            raise PassError(
                f"the codes of {layer} in the file do not fit the values that transformers reads: "
                "please report it, and export with --weights full"
            )
        return kept

    def _tensor(self, layer: str) -> Any:
        name = self._names.get_name(layer if layer == LM_HEAD else f"model.{layer}")
        # Without a head of its own, a model uses the embedding table.
        return self._tensors.get(f"{name}.weight", self._tensors["token_embd.weight"])


def read_codes(kind: str, data: Bytes, dtype: torch.dtype) -> QuantizedWeight | None:
    """Return the codes of a tensor of a type in FORMATS; None if its scales or offsets are too
    large for float16. data: the tensor's bytes in the file, [out,bytes]."""
    form, (_, size) = FORMATS[kind], gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    packed, numbers = [], []
    for rows in chunks(*data.shape):
        codes, *by_block = form.read(data[rows].reshape(-1, size))
        # Codes below the middle wrap around to negative ones.
        signed = (codes - np.uint8(form.middle or 0)).view(np.int8)
        packed.append(pack(form.scheme, torch.from_numpy(signed.reshape(len(data[rows]), -1))))
        numbers.append([each for each in by_block if each is not None])
    scales, *offsets = (
        torch.from_numpy(np.concatenate(each)).reshape(len(data), -1)
        for each in zip(*numbers, strict=True)
    )
    largest = scales * (form.middle or 1)
    if not all(bool(torch.isfinite(each.half()).all()) for each in (largest, *offsets)):
        return None
    scales, *offsets = (
        each.to(torch.float16 if dtype == torch.float32 else dtype).to(dtype)
        for each in (scales, *offsets)
    )
    zero_points = torch.zeros_like(scales, dtype=torch.uint8) if form.scheme.zero_points else None
    return QuantizedWeight(
        form.scheme, torch.cat(packed), scales, zero_points, offsets[0] if offsets else None
    )
