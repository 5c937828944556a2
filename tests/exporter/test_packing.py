"""Weights are packed as the CPU's kernels read them, without loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_exporter.derived.packing import BLOCK, CODE_BYTES, GROUP, pack, packed_bytes

Array = np.ndarray
sizes = st.tuples(st.integers(1, 70), st.integers(1, 130))
bits_of_codes = st.sampled_from(tuple(CODE_BYTES))


def random_weight(seed: int, columns: int, inputs: int, bits: int) -> tuple[Array, Array, Array]:
    rng, shape = np.random.default_rng(seed), (columns, -(-inputs // BLOCK))
    codes = rng.integers(0, 2**bits, (columns, inputs), np.uint8)
    # Any bits of float16 are kept, those of NaN too.
    scales, offsets = rng.integers(0, 1 << 16, (2, *shape), np.uint16).view(np.float16)
    return codes, scales, offsets


def code_at(block: Array, column: int, place: int, bits: int) -> int:
    word, byte = place // 4, 4 * column + place % 4
    if bits == 8:
        return int(block[64 * word + byte])
    code = block[64 * (place // 8) + byte] >> (4 if place % 8 >= 4 else 0) & 15
    if bits == 5:
        highest = int.from_bytes(block[256 + 8 * word :][:8].tobytes(), "little") >> byte & 1
        code |= highest << 4
    return int(code)


def unpack(packed: Array, bits: int, columns: int, inputs: int) -> tuple[Array, Array, Array]:
    groups, blocks, _ = packed.shape
    codes = np.zeros((groups * GROUP, blocks * BLOCK), np.uint8)
    for column, place in np.ndindex(codes.shape):
        block = packed[column // GROUP, place // BLOCK]
        codes[column, place] = code_at(block, column % GROUP, place % BLOCK, bits)
    floats = np.ascontiguousarray(packed[:, :, CODE_BYTES[bits] :]).view("<f2")
    scales, offsets = (
        part.transpose(0, 2, 1).reshape(-1, blocks) for part in np.split(floats, 2, axis=-1)
    )
    assert not codes[columns:].any() and not codes[:, inputs:].any()
    assert not scales[columns:].any() and not offsets[columns:].any()
    return codes[:columns, :inputs], scales[:columns], offsets[:columns]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(0, 1 << 30), sizes, bits_of_codes)
def test_nothing_is_lost(seed: int, sizes: tuple[int, int], bits: int):
    codes, scales, offsets = random_weight(seed, *sizes, bits)
    packed = pack(codes, bits, scales, offsets)
    assert packed.dtype == np.uint8 and packed.size == packed_bytes(*sizes, bits, symmetric=False)
    symmetric = pack(codes, bits, scales, None)
    assert symmetric.size == packed_bytes(*sizes, bits, symmetric=True)
    np.testing.assert_array_equal(symmetric, packed[..., : CODE_BYTES[bits] + 32])
    for actual, expected in zip(
        unpack(packed, bits, *sizes), (codes, scales, offsets), strict=True
    ):
        assert actual.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("bits", "bytes_of_weight"), [(4, 5 / 8), (5, 6 / 8), (8, 9 / 8)])
def test_a_block_has_a_scale_and_an_offset_of_two_bytes(bits: int, bytes_of_weight: float):
    assert packed_bytes(160, 320, bits, symmetric=False) == 160 * 320 * bytes_of_weight
    assert packed_bytes(160, 320, bits, symmetric=True) == 160 * 320 * (bytes_of_weight - 1 / 16)
