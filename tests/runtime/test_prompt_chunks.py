"""Prompts are read in chunks: on a GPU of up to 2048 rows, as far as memory allows."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_sessions import (
    SAMPLINGS,
    Gpu,
    add_fake_engines,
    assert_cpu_writes,
    assert_cpu_writes_all,
)
from hypothesis import given
from hypothesis import strategies as st

from conftest import export_bundle, make_model
from pass_runtime import GenerateOptions
from pass_runtime.backends.base import Capabilities
from pass_runtime.backends.memory import MAX_CHUNK_BYTES, activation_bytes, wide_chunks
from pass_runtime.backends.ort import backend as ort_backend
from pass_runtime.backends.trt.backend import TrtBackend
from pass_runtime.bundle.manifest import ModelInfo
from pass_runtime.bundle.read import read_manifest
from pass_runtime.decode.engine import Engine

POSITIONS, CAPACITY = 4096, 2176
PROMPT = [2 + i % 300 for i in range(2100)]


def model(dtype: str, hidden_size: int, heads: int) -> ModelInfo:
    return ModelInfo.model_construct(
        dtype=dtype, hidden_size=hidden_size, heads=heads, vocab_size=32000
    )


def test_a_chunk_is_as_wide_as_memory_for_its_activations_allows():
    """For models like 7B in fp16 and in fp32, and like 135M: by chunk width, the largest KV
    capacity with which its activations fit MAX_CHUNK_BYTES."""
    capacities = ort_backend.doubling_capacities(32768)
    large, small = model("float16", 4096, 32), model("float16", 576, 9)
    assert wide_chunks(large, capacities) == {2048: 2048, 1024: 8192}
    assert wide_chunks(model("float32", 4096, 32), capacities) == {1024: 4096}
    assert wide_chunks(small, capacities) == {2048: 16384, 1024: 32768}
    assert wide_chunks(small, (256, 512, 1000)) == {}
    for rows, capacity in wide_chunks(large, capacities).items():
        assert activation_bytes(large, rows, capacity) <= MAX_CHUNK_BYTES
        assert activation_bytes(large, rows, 2 * capacity) > MAX_CHUNK_BYTES


CPU = Capabilities("cpu", 320, (768,), (256, 64, 16, 1))
CUDA = Capabilities(
    "cuda",
    320,
    (256, 512, 1024, 2048, 4096, 8192),
    (2048, 1024, 256, 64, 16, 1),
    chunk_capacities={2048: 4096, 1024: 8192},
)


def chunks(
    limits: Capabilities, tokens: int, limit: int | None = None, capacity: int = 256
) -> list[tuple[int, int]]:
    """Return (tokens, rows) of each chunk."""
    backend, windows, start = SimpleNamespace(capacity=capacity), [], 0
    engine = SimpleNamespace(backend=backend, capabilities=limits)
    while start < tokens:
        count, width = Engine._chunk(engine, start, tokens, limit, scored=False)  # type: ignore[arg-type]
        backend.capacity = max(backend.capacity, limits.capacity(start + width))
        assert backend.capacity <= limits.chunk_capacities.get(width, limits.max_capacity)
        windows.append((count, width))
        start += count
    return windows


@pytest.mark.parametrize(
    ("limits", "capacity", "tokens", "widths"),
    [
        (CPU, 256, 1, [1]),
        (CPU, 256, 2, [16]),
        (CPU, 256, 10, [16]),
        (CPU, 256, 17, [16, 1]),
        (CPU, 256, 20, [16, 16]),
        (CPU, 256, 47, [16, 16, 16]),
        (CPU, 256, 48, [64]),
        (CPU, 256, 63, [64]),
        (CPU, 256, 70, [64, 16]),
        (CPU, 256, 191, [64, 64, 64]),
        (CPU, 256, 192, [256]),
        (CPU, 256, 300, [256, 16, 16, 16]),
        (CUDA, 256, 720, [256, 256, 256]),
        (CUDA, 256, 768, [1024]),
        (CUDA, 256, 1536, [2048]),
        (CUDA, 256, 4000, [2048, 2048]),
        # With 4096 entries in use, 2048 rows are too many.
        (CUDA, 256, 6000, [2048, 2048, 1024, 1024]),
        (CUDA, 8192, 2048, [1024, 1024]),
    ],
    ids=str,
)
def test_the_widths_in_which_a_prompt_is_read(limits, capacity, tokens, widths):
    assert [width for _, width in chunks(limits, tokens, capacity=capacity)] == widths


@given(st.integers(1, 400), st.sampled_from([None, 64]), st.sampled_from([CPU, CUDA]))
def test_only_the_last_window_is_padded_and_none_is_wider_than_the_limit(tokens, limit, limits):
    windows = chunks(limits, tokens, limit)
    assert sum(count for count, _ in windows) == tokens
    assert all(count == width for count, width in windows[:-1])
    assert all(count <= width <= (limit or 256) for count, width in windows)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    made = make_model(directory / "model", max_position_embeddings=POSITIONS, num_hidden_layers=1)
    bundle = export_bundle(made, directory / "bundle", lookahead=1)
    add_fake_engines(bundle, CAPACITY, max_batch_size=2)
    return bundle


@pytest.mark.slow
def test_engines_read_wide_chunks(bundle: Path, monkeypatch):
    widths: list[int] = []
    prefill = TrtBackend.prefill

    def recorded(backend: TrtBackend, slot: int, length: int, ids: list[int], *more) -> None:
        widths.append(more[0])
        prefill(backend, slot, length, ids, *more)

    monkeypatch.setattr(TrtBackend, "prefill", recorded)
    gpu = Gpu(bundle, monkeypatch)
    assert gpu.manifest.engines[0].prefill_widths == (2048, 1024, 256, 32)
    profiles = [each.sizes for each in gpu.manifest.engines[0].engines[-1].profiles]
    assert {sizes["batch"][2] for sizes in profiles if sizes["width"][0] > 32} == {1}
    with gpu.open(max_batch_size=2) as session:
        session.warm_up(SAMPLINGS[0])
        for width, slot in product((2048, 1024), (0, 1)):
            name = f"prefill {width} {slot} over {CAPACITY} columns"
            assert name in session.backend.captures
        captures = gpu.cuda.captures
        widths.clear()
        options = GenerateOptions(4, plan="ar", ignore_eos=True)
        written = session.generate_ids(PROMPT, options).result().token_ids
        assert_cpu_writes(bundle, (PROMPT, options), written)
        assert widths[0] == 2048 and gpu.cuda.captures == captures
        widths.clear()
        decoding = ([5, 6, 7], replace(options, max_new_tokens=60))
        requests = (decoding, ([9, *PROMPT[:1500]], options))
        assert_cpu_writes_all(session, bundle, requests)
        assert widths.count(32) > 20 and max(widths) == 32, widths


def test_onnx_runtime_reads_wide_chunks_on_cuda_only(bundle: Path, monkeypatch):
    def widths(device: str, capacity: int | None = None) -> tuple[int, ...]:
        monkeypatch.setattr(ort_backend, "choose_device", lambda _: device)
        monkeypatch.setattr(ort_backend.OrtBackend, "_open_trunks", lambda *_: None)
        options = {"capacity": capacity, "memory": ort_backend.open_memory("cpu")}
        backend = ort_backend.OrtBackend(bundle, read_manifest(bundle), device, **options)
        backend.close()
        return backend.capabilities.prefill_widths

    assert widths("cpu") == (256, 64, 16, 1)
    assert widths("cuda") == (2048, 1024, 256, 64, 16, 1)
    assert widths("cuda", 1500) == (1024, 256, 64, 16, 1)
