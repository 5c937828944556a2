"""Runs bundles on this CPU, which on_cpus.py emulates, and prints their texts and kernels as JSON.

emulated.py RESULTS.npz BUNDLE...      # RESULTS: the outputs of a bundle's sums.onnx, if it has one
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.backends.ort.kernels import find_kernels
from pass_runtime.backends.ort.trunks import needs_unsigned_weights
from pass_runtime.bundle.read import read_manifest

PROMPT = np.random.default_rng(0).integers(4, 200, 112).tolist()
PROMPT_TOKENS, TOKENS = 50, 16
"""How many tokens of PROMPT a text begins with, and how many are new."""
CHUNKS = [10, 40, 3, 16, *[1] * 6, 37]
"""Numbers of tokens in which PROMPT is read, compared with reading it at once."""
TEXTS = {  # numbers of slots -> temperatures -> plans
    1: {0.0: ("ar", "two-pass", "fused", "auto"), 0.8: ("ar", "fused")},
    3: {0.0: ("ar", "fused")},
}


def entries(backend: OrtBackend, slot: int, chunks: list[int]) -> np.ndarray:
    """[tensors,heads,length,D]: the K/V of the slot after PROMPT was read in these chunks."""
    length = 0
    for count in chunks:
        width = min(each for each in backend.capabilities.prefill_widths if each >= count)
        backend.prefill(slot, length, PROMPT[length : length + count], width)
        length += count
    _, heads, capacity, size = backend.cache.shape(1)
    found = []
    for _, address in backend.cache.addresses(slot):
        whole = np.empty((heads, capacity, size), backend.cache.dtype)
        backend.memory.download(whole, address)
        found.append(whole[:, :length].copy())
    return np.stack(found)


def reads(bundle: Path, slots: int) -> dict[str, bool]:
    """Whether the last slot's K/V are the same in chunks and at once, and what the backend says."""
    backend = OrtBackend(bundle, read_manifest(bundle), "cpu", threads=1, max_batch_size=slots)
    backend.resize(256, [0] * slots)
    in_chunks = entries(backend, slots - 1, CHUNKS)  # first, while the cache is empty
    whole = entries(backend, slots - 1, [len(PROMPT)])
    backend.close()
    return {
        "same_entries": backend.capabilities.same_entries,
        "chunks": bool(np.array_equal(in_chunks, whole)),
    }


def texts(bundle: Path, slots: int) -> tuple[dict[str, list[int]], int]:
    """Return the tokens by plan and temperature, and how many prompt tokens the last run reused."""
    found = {}
    with load(bundle, "cpu", threads=1, max_batch_size=slots) as session:
        for temperature, plans in TEXTS[slots].items():
            for plan in plans:
                options = GenerateOptions(
                    TOKENS, SamplingParams(temperature, seed=3), plan=plan, ignore_eos=True
                )
                written = session.generate_ids(PROMPT[:PROMPT_TOKENS], options).result()
                found[f"{plan} at {temperature}"] = written.token_ids
    return found, written.stats.cached_tokens


def write_sums(bundle: Path, path: Path) -> None:
    """Run sums.onnx as the bundle's trunk is run, and write its outputs."""
    unsigned = needs_unsigned_weights(bundle, read_manifest(bundle))
    session = open_session(bundle / "sums.onnx", "cpu", threads=1, unsigned=unsigned)
    names = [value.name for value in session.get_outputs()]
    with np.load(bundle / "sums.inputs.npz") as inputs:
        results = session.run(
            names, {value.name: inputs[value.name] for value in session.get_inputs()}
        )
    np.savez(path, **dict(zip(names, results, strict=True)))


def run(bundle: Path, results: Path) -> dict[str, Any]:
    by_slots = {}
    for slots in TEXTS:
        written, cached = texts(bundle, slots)
        by_slots[slots] = {**reads(bundle, slots), "texts": written, "cached": cached}
    if (bundle / "sums.onnx").exists():
        write_sums(bundle, results)
    return {"kernels": find_kernels(read_manifest(bundle))._asdict(), "slots": by_slots}


if __name__ == "__main__":
    results, *bundles = map(Path, sys.argv[1:])
    print(json.dumps([run(bundle, results) for bundle in bundles]))
