"""Runs bundles on the CPU that it finds, which on_cpus.py emulates, and prints what it found as JSON.

    emulated.py BUNDLE...      # a folder `sums` beside a bundle's files has a graph and inputs, whose results it writes
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
CHUNKS = {"64": [64, 48], "16": [16] * 7, "1": [16] * 5 + [1] * 32, "ragged": [10, 64, 3, 11, 24]}
"""Ways to read PROMPT; the single tokens come last, because a pass of one is slow here."""
PLANS = ("ar", "two-pass", "fused", "auto")


def read(bundle: Path, chunks: list[int], slots: int) -> tuple[np.ndarray, bool]:
    """The K/V that the last slot has after these chunks, and whether the backend says that all ways agree."""
    backend = OrtBackend(bundle, read_manifest(bundle), "cpu", threads=1, max_batch_size=slots)
    backend.resize(256, [0] * slots)
    length = 0
    for count in chunks:
        width = min(each for each in backend.capabilities.prefill_widths if each >= count)
        backend.prefill(slots - 1, length, PROMPT[length : length + count], width)
        length += count
    _, heads, capacity, size = backend.cache.shape(1)
    found = []
    for _, address in backend.cache.places(slots - 1):
        whole = np.empty((heads, capacity, size), backend.cache.dtype)
        backend.memory.download(whole, address)
        found.append(whole[:, :length].copy())
    backend.close()
    return np.stack(found), backend.capabilities.same_entries


def texts(bundle: Path, slots: int) -> dict[str, bool]:
    """Whether a plan writes plain decoding's text, by temperature and plan."""
    found = {}
    with load(bundle, "cpu", threads=1, max_batch_size=slots) as session:
        for temperature in (0.0, 0.8):
            written = {}
            for plan in PLANS:
                options = GenerateOptions(24, SamplingParams(temperature, seed=3), plan=plan, ignore_eos=True)
                written[plan] = session.generate_ids(PROMPT[:20], options).result().token_ids
                found[f"{plan} at {temperature}, {slots} slots"] = written[plan] == written["ar"]
    return found


def cached_tokens(bundle: Path) -> tuple[int, bool]:
    """How many tokens of a prompt the prefix cache knows the second time, and whether the text is the same."""
    options = GenerateOptions(12, plan="fused", ignore_eos=True)
    with load(bundle, "cpu", threads=1) as session:
        first, again = (session.generate_ids(PROMPT[:50], options).result() for _ in range(2))
    return again.stats.cached_tokens, first.token_ids == again.token_ids


def write_sums(bundle: Path) -> None:
    """Run the graph of `sums` as the bundle's trunk is run, and write its outputs."""
    unsigned = needs_unsigned_weights(bundle, read_manifest(bundle))
    session = open_session(bundle / "sums.onnx", "cpu", threads=1, unsigned=unsigned)
    names = [value.name for value in session.get_outputs()]
    with np.load(bundle / "sums.inputs.npz") as inputs:
        results = session.run(names, {value.name: inputs[value.name] for value in session.get_inputs()})
    np.savez(bundle / "sums.results.npz", **dict(zip(names, results, strict=True)))


def run(bundle: Path) -> dict[str, Any]:
    agree, same = {}, {}
    for slots in (1, 3):
        whole, agree[slots] = read(bundle, [112], slots)
        for name, chunks in CHUNKS.items():
            same[f"{name}, {slots} slots"] = bool(np.array_equal(read(bundle, chunks, slots)[0], whole))
    if (bundle / "sums.onnx").exists():
        write_sums(bundle)
    return {
        "kernels": find_kernels(read_manifest(bundle))._asdict(),
        "same_entries": agree,
        "chunks": same,
        "texts": texts(bundle, 1) | texts(bundle, 3),
        "cached": cached_tokens(bundle),
    }


if __name__ == "__main__":
    print(json.dumps({Path(each).name: run(Path(each)) for each in sys.argv[1:]}))
