from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.backends.memory import Buffers, HostMemory
from pass_runtime.backends.ort import backend as ort_backend
from pass_runtime.backends.ort.backend import BoundSessions

SLOTS = 3


class RecordingMemory(HostMemory):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        address = super().allocate(size)
        self.sizes[address] = size
        return address


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=40))
def test_shapes_of_one_name_share_memory(widths: list[int]):
    memory = RecordingMemory()
    buffers = Buffers(memory, SLOTS, {"logits"})
    addresses: dict[int, int] = {}
    for width in widths:
        shape = (width, 7)
        address = buffers.rows_address("logits", shape, np.float32)
        assert addresses.setdefault(width, address) == address
        size = SLOTS * math.prod(shape) * 4
        ends = {start: start + allocated for start, allocated in memory.sizes.items()}
        assert any(start <= address and address + size <= end for start, end in ends.items())
    largest = max(max(SLOTS * width * 7 * 4, 4) for width in widths)
    assert sum(memory.sizes.values()) < 4 * largest
    # A buffer of another name has memory of its own.
    assert buffers.rows_address("other", (1, 7), np.float32) not in addresses.values()
    windows = {buffers.rows_address("input_ids", (width,), np.int64) for width in set(widths)}
    assert len(windows) == len(set(widths))  # windows share no memory, as the next pass reads them


def test_only_buffers_that_no_later_pass_reads_are_shared(tiny_bundle: Path):
    session = load(tiny_bundle, "cpu", threads=1)
    transient = session.backend.bindings.transient
    assert transient >= {"logits", "emitted", "count", "chosen_logprob", "top_ids", "top_logprobs"}
    kept = {"input_ids", "length", "next_ids", "noise_offsets", "temperature", "active"}
    assert not transient & kept


@pytest.mark.parametrize("max_bound", [256, 2], ids=["all are kept", "two are kept"])
def test_memory_and_bound_graphs_stay_bounded(random_bundle: Path, monkeypatch, max_bound: int):
    # For what is bound: how often, by the number of the graph that is captured for it.
    graph_numbers: dict[str, Counter[int]] = {}
    bind = ort_backend.BoundSession

    def record(session, device, inputs, outputs, cache, graph, *more, **named):
        bound = [(t.name, t.shape, t.address) for t in (*inputs, *outputs, *cache[0])]
        key = f"{id(session)} {bound}"
        graph_numbers.setdefault(key, Counter())[graph] += 1
        return bind(session, device, inputs, outputs, cache, graph, *more, **named)

    monkeypatch.setattr(ort_backend, "BoundSession", record)
    monkeypatch.setattr(BoundSessions, "MAX_BOUND", max_bound)
    plans = ["ar", "two-pass", "fused"]
    plans += [f"fused:{groups}" for groups in ("1,1", "1,0", "1,1,1", "2,1,1", "2,2,1")]
    session = load(random_bundle, "cpu", threads=1, max_batch_size=2)
    memory = session.backend.memory
    samplings = [SamplingParams(), SamplingParams(0.9, seed=3)]
    requests = [
        GenerateOptions(6, sampling, plan=plan, ignore_eos=True)
        for plan in plans
        for sampling in samplings
    ]
    texts = [session.generate_ids([5, 6], options).result().token_ids for options in requests]
    allocations = len(memory._blocks)
    again = [session.generate_ids([5, 6], options).result().token_ids for options in requests]
    assert texts == again
    assert texts == [texts[i % 2] for i in range(len(texts))]  # the plan changes no text
    assert len(memory._blocks) == allocations
    # The same binding always has the same number, and so replays the graph captured for it.
    assert all(len(numbers) == 1 for numbers in graph_numbers.values())
    is_bound_again = any(max(numbers.values()) > 1 for numbers in graph_numbers.values())
    assert is_bound_again == (max_bound == 2)
    backend = session.backend
    for bound in (backend._bound_trunks, backend._bound_tails, backend._bound_prefills):
        assert len(bound._bound) <= max_bound
