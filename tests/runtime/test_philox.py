from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from pass_runtime.bundle import noise

BELOW_2_64 = st.integers(0, 2**64 - 1)
ONES = 0xFFFFFFFF

# kat_vectors of Random123, lines "philox4x32 10".
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_philox_gives_its_published_answers():
    columns = zip(*KNOWN_ANSWERS, strict=True)
    counters, keys, answers = (np.array(column, np.uint32) for column in columns)
    words = noise.philox4x32(counters, keys)
    assert words.dtype == np.uint32
    assert words.tolist() == answers.tolist()
    for counter, key, answer in zip(counters, keys, answers, strict=True):
        assert noise.philox4x32(counter, key).tolist() == answer.tolist()


@settings(derandomize=True, deadline=None, max_examples=30)
@given(seed=BELOW_2_64, start=st.integers(0, 2**40))
def test_offsets_are_the_top_15_bits_of_two_philox_words_of_the_position_alone(seed, start):
    positions = np.arange(start, start + 64, dtype=np.int64)
    offsets = noise.noise_offsets(seed, positions)
    assert (offsets.shape, offsets.dtype) == ((64, 2), np.int64)
    key = np.array([seed & ONES, seed >> 32], np.uint32)
    for position, pair in zip(positions.tolist(), offsets.tolist(), strict=True):
        counter = np.array([position & ONES, position >> 32, 0, 0], np.uint32)
        assert pair == [int(word) >> 17 for word in noise.philox4x32(counter, key)[:2]]
    # The same position has the same offsets among other positions and in another order.
    assert np.array_equal(noise.noise_offsets(seed, positions[::-3]), offsets[::-3])


def test_offsets_use_their_whole_range_evenly():
    offsets = noise.noise_offsets(7, np.arange(200_000, dtype=np.int64))
    for column in offsets.T:
        for bits in (column >> 7, column & 255):
            assert chisquare(np.bincount(bits, minlength=256)).pvalue > 1e-3


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 128, 129, 320, 1501])
def test_no_two_blocks_or_tokens_read_the_same_entry(vocab_size):
    for table in noise.noise_tables(vocab_size):
        assert table.dtype == np.int32
        # From its offset on, a position reads a row of 16 entries for the tokens of a block, and
        # then one entry for each block. With the largest offset, the last of them is in the last
        # row of the table.
        block_count = -(-vocab_size // 8)
        last_entry = (2**15 - 1) * 16 + 16 + block_count - 1
        assert last_entry // 16 == len(table) - 1
    (first_block, block_count), (first_token, block_size) = noise.entries_per_position(vocab_size)
    assert block_size == 8 and block_count == -(-vocab_size // 8)
    entries = [
        *range(first_block, first_block + block_count),
        *range(first_token, first_token + block_size),
    ]
    assert len(set(entries)) == len(entries)
    assert max(entries) < 16 * noise.rows_per_position(vocab_size)


def test_tables_hold_uniform_30_bit_integers_and_do_not_depend_on_the_vocabulary():
    first, second = noise.noise_tables(320)
    assert (first == second).mean() < 1e-4
    for small, large in zip((first, second), noise.noise_tables(1501), strict=True):
        assert np.array_equal(small, large[: len(small)])
        values = small.ravel().astype(np.int64)
        assert values.min() >= 0 and values.max() < 2**30
        for bits in (values >> 20, (values >> 10) & 1023, values & 1023):
            assert chisquare(np.bincount(bits, minlength=1024)).pvalue > 1e-3


def test_tables_are_not_correlated_along_rows_columns_or_with_each_other():
    first, second = (table.astype(np.float64) for table in noise.noise_tables(320))
    pairs = {
        "next row": (first[1:], first[:-1]),
        "next entry": (first.ravel()[1:], first.ravel()[:-1]),
        "other table": (first, second),
    }
    for name, (a, b) in pairs.items():
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(a.size), name
