"""How training uses a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_exporter.model.families import Geometry
from pass_runtime.measuring.lossless import loop_start
from pass_trainer import drafter, loops
from pass_trainer.config import TrainConfig
from pass_trainer.sizes import MAX_BATCH, MAX_SHARD_SEQUENCES, batch_size, shard_size

SMALL = Geometry(49152, 576, 30, 9, 3, 64, 8192, (None,) * 30)
"""135M parameters; MLPs are 1536 wide."""
LARGE = Geometry(32000, 4096, 32, 32, 32, 128, 4096, (None,) * 32)
"""7B parameters; MLPs are 11008 wide."""
GIB = 2**30


def config(lookahead: int = 8) -> TrainConfig:
    return TrainConfig("model", (), Path("out"), lookahead=lookahead)


def test_the_sizes_on_a_cpu_are_fixed_and_a_large_gpu_gets_the_largest():
    for memory, sizes in ((None, (64, 1)), (140 * GIB, (MAX_SHARD_SEQUENCES, MAX_BATCH))):
        batch = batch_size(memory, SMALL, 1536, config())
        assert (shard_size(memory, SMALL, 256), batch) == sizes


@settings(deadline=None)
@given(
    st.integers(1, 200 * GIB),
    st.integers(1, 200 * GIB),
    st.sampled_from([(SMALL, 1536), (LARGE, 11008)]),
)
def test_more_memory_never_gives_smaller_sizes(memory_1, memory_2, model):
    geometry, intermediate = model
    less, more = sorted((memory_1, memory_2))
    shards = [shard_size(memory, geometry, 256) for memory in (less, more)]
    batches = [batch_size(memory, geometry, intermediate, config()) for memory in (less, more)]
    assert 64 <= shards[0] <= shards[1] <= MAX_SHARD_SEQUENCES
    assert all(size % 64 == 0 for size in shards)
    assert 1 <= batches[0] <= batches[1] <= MAX_BATCH


@pytest.mark.parametrize("memory", [16 * GIB, 80 * GIB])
def test_longer_sequences_and_larger_models_get_smaller_sizes(memory: int):
    assert (
        shard_size(memory, LARGE, 2048)
        <= shard_size(memory, LARGE, 256)
        < shard_size(memory, SMALL, 256)
    )
    assert batch_size(memory, LARGE, 11008, config()) < batch_size(memory, SMALL, 1536, config())
    long = replace(config(), recipe=replace(config().recipe, sequence_length=4096))
    assert batch_size(memory, LARGE, 11008, long) <= batch_size(memory, LARGE, 11008, config())


def squared_errors(
    hidden: torch.Tensor, corrections: torch.Tensor | None, states: torch.Tensor
) -> torch.Tensor:
    """Return losses [n], whose gradients differ from row to row."""
    if corrections is not None:
        hidden = hidden + corrections @ torch.ones(corrections.shape[1], hidden.shape[1])
    return ((hidden - states) ** 2).sum(-1)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100])
def test_a_sum_in_chunks_has_the_value_and_gradients_of_a_plain_sum(
    chunk_rows: int, corrected: bool, monkeypatch: pytest.MonkeyPatch
):
    vocabulary = 5
    monkeypatch.setattr(drafter, "CHUNK_ELEMENTS", chunk_rows * vocabulary)
    torch.manual_seed(0)
    hidden, states, weights = torch.randn(7, 4), torch.randn(7, 4), torch.rand(7)
    trained = [hidden, *([torch.randn(7, 2)] if corrected else [])]
    results = []
    for in_chunks in (False, True):
        inputs = [tensor.clone().requires_grad_() for tensor in trained]
        corrections = inputs[1] if corrected else None
        if in_chunks:
            total = drafter.sum_over_rows(
                squared_errors, inputs[0], corrections, states, weights, vocabulary
            )
        else:
            total = (squared_errors(inputs[0], corrections, states) * weights).sum()
        (2 * total).backward()  # gradients must have a factor of the sum, too
        results.append([total.detach(), *(tensor.grad for tensor in inputs)])
    plain, chunked = results
    torch.testing.assert_close(chunked, plain)


@pytest.mark.slow
def test_worker_processes_find_the_loops_of_many_texts():
    looping, count = [1, 2, 3] * 20, 2 * loops.TASK_TEXTS + 5  # more texts than two tasks have
    texts = [looping if i % 3 else list(range(i, i + 40)) for i in range(count)]
    expected = [loop_start(text) for text in texts]
    assert loops.loop_starts(texts) == expected and None in expected and len(set(expected)) > 1
