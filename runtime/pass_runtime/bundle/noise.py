"""The random numbers (noise) with which tokens are drawn. They depend on the request's seed and
the position alone; engines compute them from two integers that the host sends.

Exponential sampling (the Gumbel-max trick) draws a block of 8 token ids, and then one of them:

    k = argmin_k E_k / P_k          P_k = the sum of the probabilities of block k
    j = argmin_j F_j / p_(k + jK)   block k of K has the ids k, k + K, ... k + 7 K

Token i has probability p_i, as with one level, from an eighth of the numbers. A block has one of
the low, frequent ids: a draft and the model's token are equal nearly as often as with one level.

E_k and F_j are -log(1 - u). A position's u_i come from tables T1 and T2 of random 30-bit
integers and two offsets b and d, which Philox4x32-10 draws with the seed as its key:

    x_i = (T1[16 b + i] + T2[16 d + i]) mod 2^30          u_i = (x_i + 1/2) * 2^-30 * (1 - 2^-24)

Two positions share noise with probability 2^-30. Offsets count rows of 16: a Gather of single
entries takes ONNX Runtime 7 times as long. 1 - 2^-24 keeps u below one in float32.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

SCHEME = "block-race-1"
BITS = 30
SCALE = np.float32(2.0**-BITS * (1 - 2.0**-24))
SERIES_LIMIT = np.float32(2.0**-8)
"""Below it, -log(1-u) is computed as u + u^2/2 + u^3/3: the relative error is below 2^-25."""

STREAMS = ("noise_offsets", "accept_offsets", "draft_offsets")
"""Tail inputs with offsets, each with noise of its own."""

BLOCK_SIZE = 8
ROW_SIZE = 16
_OFFSET_COUNT = 1 << 15
TABLES_FILE = "tail.noise.data"
"""T1 and then T2, little-endian."""
TABLES = ("noise_table_1", "noise_table_2")
_TABLE_KEYS = (0x50615353_00000001, 0x50615353_00000002)
""""PaSS" in ASCII, and the number of the table."""

Words = npt.NDArray[np.uint32]


def philox4x32(counter: Words, key: Words, rounds: int = 10) -> Words:
    """Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
    counter [...,4] uint32, key [...,2] uint32 -> [...,4] uint32."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for _ in range(rounds):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> shift) ^ c1 ^ k0,
            product1 & low,
            (product0 >> shift) ^ c3 ^ k1,
            product0 & low,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


def _random_words(seed: int, counters: npt.NDArray[np.int64], stream: int = 0) -> Words:
    """counters [N] -> [N,4] uint32. stream: the third word of Philox's counter."""
    counter = np.zeros((len(counters), 4), np.uint32)
    counter[:, 2] = stream
    counter[:, 0] = counters & 0xFFFFFFFF
    counter[:, 1] = counters >> 32
    key = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)
    return philox4x32(counter, key)


def vocabulary_blocks(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK_SIZE)


def rows_per_position(vocab_size: int) -> int:
    """The first row is for F, the others are for E."""
    return -(-vocabulary_blocks(vocab_size) // ROW_SIZE) + 1


def entries_per_position(vocab_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (first entry, count) of a position's E, and of its F."""
    return (ROW_SIZE, vocabulary_blocks(vocab_size)), (0, BLOCK_SIZE)


@lru_cache(maxsize=4)
def noise_tables(vocab_size: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return T1 and T2, int32 [2^15 - 1 + rows_per_position, 16] each."""
    rows = _OFFSET_COUNT - 1 + rows_per_position(vocab_size)
    first, second = (_table(key, rows) for key in _TABLE_KEYS)
    return first, second


def _table(key: int, rows: int) -> npt.NDArray[np.int32]:
    words = _random_words(key, np.arange(rows * ROW_SIZE // 4, dtype=np.int64))
    return (words >> np.uint32(32 - BITS)).astype(np.int32).reshape(rows, ROW_SIZE)


def noise_offsets(
    seed: int, positions: npt.NDArray[np.int64], stream: str = "noise_offsets"
) -> npt.NDArray[np.int64]:
    """Return the offsets (b, d) [N,2] of N positions. stream: one of STREAMS."""
    words = _random_words(seed, positions, STREAMS.index(stream))
    return (words[:, :2] >> np.uint32(17)).astype(np.int64)
