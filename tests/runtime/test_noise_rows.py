from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.backends import memory
from pass_runtime.backends.memory import Buffers, HostMemory, NoiseRows
from pass_runtime.bundle.noise import STREAMS, noise_offsets


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 900), st.integers(1, 60)), max_size=12),
    st.booleans(),
)
def test_what_a_pass_may_read_is_the_noise_of_its_positions(passes, begins_anew):
    buffers = Buffers(HostMemory(), 3)
    rows = NoiseRows(buffers, "rejection", 3, 1000)
    for slot in range(3):
        rows.begin(slot, slot + 7)
    for slot, first, count in passes:
        if begins_anew:
            rows.begin(slot, slot + 7)
        stop = min(first + count, 1000)
        rows.cover(slot, first, first + count)
        for stream in STREAMS:
            noise = buffers.read(stream, (3, 1000, 2), np.int64)[slot, first:stop]
            assert np.array_equal(noise, noise_offsets(slot + 7, np.arange(first, stop), stream))


@pytest.mark.parametrize("name", ["tiny_bundle", "rejection_bundle"])
def test_a_request_fills_in_few_positions_when_it_begins(request, monkeypatch, name: str):
    computed: list[int] = []

    def counted(seed: int, positions: np.ndarray, stream: str) -> np.ndarray:
        computed.append(len(positions))
        return noise_offsets(seed, positions, stream)

    monkeypatch.setattr(memory, "noise_offsets", counted)
    with load(request.getfixturevalue(name), "cpu", threads=1) as session:
        sampled, greedy = SamplingParams(0.9, seed=1), SamplingParams()
        options = GenerateOptions(4, sampled, plan="ar", ignore_eos=True)
        session.generate_ids([5] * 300, options).result()
        stream_count = 3 if session.manifest.rule == "rejection" else 1
        assert len(computed) == stream_count
        assert max(computed) < 300 < session.backend.capabilities.noise_positions
        session.generate_ids([5], replace(options, sampling=greedy)).result()
        assert len(computed) == stream_count  # a greedy request has no noise
