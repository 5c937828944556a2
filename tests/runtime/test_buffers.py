"""The memory of a session on its device is bounded: buffers of many shapes share it, and bindings
are forgotten that were not used for long. Addresses never change, since captured graphs hold
them."""

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
from pass_runtime.backends.ort.trunks import BoundSessions

SLOTS = 3


class Counted(HostMemory):
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
    memory = Counted()
    buffers = Buffers(memory, SLOTS, {"logits"})
    addresses: dict[int, int] = {}
    for width in widths:
        shape = (width, 7)
        address = buffers.rows_address("logits", shape, np.float32)
        assert addresses.setdefault(width, address) == address
        size = SLOTS * math.prod(shape) * 4
        ends = {start: start + have for start, have in memory.sizes.items()}
        assert any(start <= address and address + size <= end for start, end in ends.items())
    largest = max(max(SLOTS * width * 7 * 4, 4) for width in widths)
    assert sum(memory.sizes.values()) < 4 * largest
    # Another name gets other memory.
    assert buffers.rows_address("other", (1, 7), np.float32) not in addresses.values()
    windows = {buffers.rows_address("input_ids", (width,), np.int64) for width in set(widths)}
    assert len(windows) == len(set(widths))  # the next pass reads windows: they share no memory


def test_only_buffers_that_no_later_pass_reads_are_shared(tiny_bundle: Path):
    session = load(tiny_bundle, "cpu", threads=1)
    transient = session.backend.bindings.transient
    assert transient >= {"logits", "emitted", "count", "chosen_logprob", "top_ids", "top_logprobs"}
    kept = {"input_ids", "length", "next_ids", "noise_offsets", "temperature", "active"}
    assert not transient & kept


@pytest.mark.parametrize("kept", [256, 2], ids=["all is kept", "two are kept"])
def test_memory_and_bound_graphs_stay_bounded(random_bundle: Path, monkeypatch, kept: int):
    """With every plan, sampler and batch; the plan changes no text."""
    graphs: dict[str, Counter[int]] = {}
    bind = ort_backend.bind

    def noted(session, device, inputs, outputs, cache, graph, *more, **named):
        bound = [(t.name, t.shape, t.address) for t in (*inputs, *outputs, *cache[0])]
        key = f"{id(session)} {bound}"
        graphs.setdefault(key, Counter())[graph] += 1
        return bind(session, device, inputs, outputs, cache, graph, *more, **named)

    monkeypatch.setattr(ort_backend, "bind", noted)
    monkeypatch.setattr(BoundSessions, "MAX_BOUND", kept)
    plans = ["ar", "two-pass", "fused"]
    plans += [f"fused:{groups}" for groups in ("1,1", "1,0", "1,1,1", "2,1,1", "2,2,1")]
    session = load(random_bundle, "cpu", threads=1, max_batch_size=2)
    memory = session.backend.memory
    sampled = [SamplingParams(), SamplingParams(0.9, seed=3)]
    asked = [GenerateOptions(6, s, plan=plan, ignore_eos=True) for plan in plans for s in sampled]
    found = [session.generate_ids([5, 6], options).result().token_ids for options in asked]
    blocks = len(memory._blocks)
    again = [session.generate_ids([5, 6], options).result().token_ids for options in asked]
    assert found == again
    assert found == [found[i % 2] for i in range(len(found))]  # the plan changes no text
    assert len(memory._blocks) == blocks
    # What is bound again replays the graph captured for it.
    assert all(len(ids) == 1 for ids in graphs.values())
    assert (max(max(ids.values()) for ids in graphs.values()) > 1) == (kept == 2)
    backend = session.backend
    for bound in (backend._bound_trunks, backend._bound_tails, backend._bound_prefills):
        assert len(bound._bound) <= kept
