"""Runs bundles on this CPU, and prints their texts and ONNX Runtime's kernels as JSON.

    emulated.py RESULTS.npz BUNDLE...

on_cpus.py starts this program on a CPU that qemu-user emulates. RESULTS.npz gets the outputs of
sums.onnx, if a bundle has such a file.
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
"""A text begins with so many tokens of PROMPT, and so many new ones are decoded."""
CHUNKS = [10, 40, 3, 16, *[1] * 6, 37]
"""Numbers of tokens of the chunks in which PROMPT is read, compared with reading it at once."""
TEXTS = {  # number of slots -> temperature -> plans
    1: {0.0: ("ar", "two-pass", "fused", "auto"), 0.8: ("ar", "fused")},
    3: {0.0: ("ar", "fused")},
}


def entries(backend: OrtBackend, slot: int, chunks: list[int]) -> np.ndarray:
    """Read PROMPT in these chunks. Return the slot's K/V: [tensors,heads,length,D].

    chunks: numbers of tokens.
    """
    length = 0
    for count in chunks:
        width = min(each for each in backend.capabilities.prefill_widths if each >= count)
        backend.prefill(slot, length, PROMPT[length : length + count], width)
        length += count
    _, heads, capacity, size = backend.cache.shape(1)
    tensors = []
    for _, address in backend.cache.addresses(slot):
        tensor = np.empty((heads, capacity, size), backend.cache.dtype)
        backend.memory.download(tensor, address)
        tensors.append(tensor[:, :length].copy())
    return np.stack(tensors)


def compare_chunks(bundle: Path, slots: int) -> dict[str, bool]:
    """Return whether PROMPT has the same K/V read in chunks and at once, in the last slot (chunks),
    and whether the backend says that it has (same_entries)."""
    backend = OrtBackend(bundle, read_manifest(bundle), "cpu", threads=1, max_batch_size=slots)
    backend.resize(256, [0] * slots)
    # In chunks first: afterwards the cache has the right entries already.
    in_chunks = entries(backend, slots - 1, CHUNKS)
    whole = entries(backend, slots - 1, [len(PROMPT)])
    backend.close()
    return {
        "same_entries": backend.capabilities.same_entries,
        "chunks": bool(np.array_equal(in_chunks, whole)),
    }


def texts(bundle: Path, slots: int) -> tuple[dict[str, list[int]], int]:
    """Return the tokens by plan and temperature ("ar at 0.8"), and how many prompt tokens the last
    of these texts took from the prefix cache."""
    tokens = {}
    with load(bundle, "cpu", threads=1, max_batch_size=slots) as session:
        for temperature, plans in TEXTS[slots].items():
            for plan in plans:
                sampling = SamplingParams(temperature, seed=3)
                options = GenerateOptions(TOKENS, sampling, plan=plan, ignore_eos=True)
                result = session.generate_ids(PROMPT[:PROMPT_TOKENS], options).result()
                tokens[f"{plan} at {temperature}"] = result.token_ids
    return tokens, result.stats.cached_tokens


def write_sums(bundle: Path, path: Path) -> None:
    """Run sums.onnx with the session options of the bundle's trunk, and write its outputs."""
    unsigned = needs_unsigned_weights(bundle, read_manifest(bundle))
    session = open_session(bundle / "sums.onnx", "cpu", threads=1, unsigned=unsigned)
    names = [value.name for value in session.get_outputs()]
    with np.load(bundle / "sums.inputs.npz") as inputs:
        results = session.run(
            names, {value.name: inputs[value.name] for value in session.get_inputs()}
        )
    np.savez(path, **dict(zip(names, results, strict=True)))


def run(bundle: Path, results: Path) -> dict[str, Any]:
    """Return what is printed of a bundle. results: the file for `write_sums`."""
    by_slots = {}
    for slots in TEXTS:
        written, cached = texts(bundle, slots)
        by_slots[slots] = {**compare_chunks(bundle, slots), "texts": written, "cached": cached}
    if (bundle / "sums.onnx").exists():
        write_sums(bundle, results)
    return {"kernels": find_kernels(read_manifest(bundle))._asdict(), "slots": by_slots}


if __name__ == "__main__":
    results, *bundles = map(Path, sys.argv[1:])
    print(json.dumps([run(bundle, results) for bundle in bundles]))
