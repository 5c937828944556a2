"""Packs weights as the operators of the CPU trunk read them (`runtime/kernels/kernels.h`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK, GROUP = 32, 16
CODE_BYTES = {4: 256, 5: 320, 8: 512}
"""Bits of a code -> bytes of the codes of 16 columns and 32 inputs."""

Bytes = npt.NDArray[np.uint8]


def packed_bytes(columns: int, inputs: int, bits: int, *, symmetric: bool) -> int:
    block = CODE_BYTES[bits] + (32 if symmetric else 64)
    return -(-columns // GROUP) * -(-inputs // BLOCK) * block


def is_symmetric(
    bits: int, scales: npt.NDArray[np.float16], offsets: npt.NDArray[np.float16]
) -> bool:
    """Whether the code in the middle stands for 0 in all blocks."""
    return np.array_equal(offsets, scales * np.float16(-(1 << (bits - 1))))


def pack(
    codes: Bytes,
    bits: int,
    scales: npt.NDArray[np.float16],
    offsets: npt.NDArray[np.float16] | None,
) -> Bytes:
    """Pack a weight, value = code * scale + offset, to [groups,blocks,bytes], the last filled up
    with 0.

    codes: [out,in]. scales, offsets: [out,blocks]; no offsets if the weight is symmetric.
    """
    outputs, inputs = codes.shape
    groups, blocks = -(-outputs // GROUP), -(-inputs // BLOCK)
    padding = (groups * GROUP - outputs, blocks * BLOCK - inputs)
    parts: list[Bytes]
    codes = np.pad(codes, ((0, padding[0]), (0, padding[1])))
    # [groups,blocks,8 words of 4 inputs,16 columns,4 inputs]
    words = codes.reshape(groups, GROUP, blocks, 8, 4).transpose(0, 2, 3, 1, 4)
    by_word = words.reshape(groups, blocks, 8, 64)
    if bits == 8:
        parts = [by_word.reshape(groups, blocks, 512)]
    else:
        nibbles = by_word & np.uint8(15)
        pairs = nibbles[:, :, ::2] | nibbles[:, :, 1::2] << np.uint8(4)
        parts = [pairs.reshape(groups, blocks, 256)]
        if bits == 5:
            fifth = np.packbits(by_word >> np.uint8(4), axis=-1, bitorder="little")
            parts.append(fifth.reshape(groups, blocks, 64))
    parts += [_by_group(each, padding[0]) for each in (scales, offsets) if each is not None]
    return np.concatenate(parts, axis=-1)


def interleave(gate: Bytes, up: Bytes) -> Bytes:
    """Alternate the groups of two packed weights."""
    return np.stack((gate, up), 1).reshape(-1, *gate.shape[1:])


def _by_group(values: npt.NDArray[Any], padding: int) -> Bytes:
    padded = np.pad(values.astype("<f2"), ((0, padding), (0, 0)))
    grouped = padded.reshape(-1, GROUP, padded.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(grouped).view(np.uint8)
