from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_sessions import submit_together
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import export_bundle, make_model
from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.backends import memory
from pass_runtime.backends.memory import Buffers, HostMemory, NoiseRows
from pass_runtime.bundle.noise import STREAMS, noise_offsets

SAMPLED = [
    SamplingParams(0.9, seed=1),
    SamplingParams(),
    SamplingParams(1.0, 40, 0.9, seed=2**63 + 5),
]


@pytest.fixture(scope="module", params=["match", "rejection"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("noise")
    model = make_model(directory / "model", initializer_range=0.06)
    return export_bundle(model, directory / "exported", lookahead=3, rule=request.param)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every computation of noise appends its number of positions."""
    position_counts: list[int] = []

    def counted(seed, positions, stream):
        position_counts.append(len(positions))
        return noise_offsets(seed, positions, stream)

    monkeypatch.setattr(memory, "noise_offsets", counted)
    return position_counts


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


def texts(bundle: Path) -> list[list[int]]:
    """Return the tokens of requests that move between slots or begin in a slot that was used."""
    session = load(bundle, "cpu", threads=1, max_batch_size=4)
    plans = ("fused", "two-pass", "ar")
    options = [
        GenerateOptions(20 + 90 * (i % 3), SAMPLED[i % 3], plan=plans[i // 3], ignore_eos=True)
        for i in range(9)
    ]
    requests = [([5] * (1 + 40 * i), each) for i, each in enumerate(options)]
    return [stream.result().token_ids for stream in submit_together(session, requests)]


@pytest.mark.slow
def test_how_much_is_filled_ahead_changes_no_token(bundle: Path, computed: list[int], monkeypatch):
    monkeypatch.setattr(memory, "NOISE_AHEAD_POSITIONS", 1000)
    expected = texts(bundle)
    for ahead in (0, 1, 50):  # 0: exactly what the next pass may read
        del computed[:]
        monkeypatch.setattr(memory, "NOISE_AHEAD_POSITIONS", ahead)
        assert texts(bundle) == expected
        assert len(computed) > 100 / (ahead + 1)  # the noise was indeed filled in small parts


def test_a_request_fills_in_few_positions_when_it_begins(bundle: Path, computed: list[int]):
    session = load(bundle, "cpu", threads=1, max_batch_size=2)
    positions = session.backend.capabilities.noise_positions
    options = GenerateOptions(4, SAMPLED[0], plan="ar", ignore_eos=True)
    session.generate_ids([5] * 300, options).result()
    stream_count = 3 if session.manifest.rule == "rejection" else 1
    assert len(computed) == stream_count and max(computed) < 300 < positions
    session.generate_ids([5], GenerateOptions(4, SAMPLED[1], plan="ar", ignore_eos=True)).result()
    assert len(computed) == stream_count  # a greedy request has no noise
