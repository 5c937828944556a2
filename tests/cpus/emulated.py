"""Prints what bundles (the arguments) compute on this CPU, as JSON. See on_cpus.py."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.bundle.read import read_manifest

PROMPT = np.random.default_rng(0).integers(4, 200, 112).tolist()
PROMPT_TOKENS, TOKENS = 50, 16
CHUNKS = [10, 40, 3, 16, *[1] * 6, 37]
"""Tokens of the chunks in which PROMPT is read."""
TEXTS = {  # number of slots -> temperature -> plans
    1: {0.0: ("ar", "two-pass", "fused", "auto"), 0.8: ("ar", "fused")},
    3: {0.0: ("ar", "fused")},
}


def entries(backend: OrtBackend, slot: int, chunks: list[int]) -> str:
    """Read PROMPT in chunks. Return a hash of the slot's K/V."""
    length = 0
    for count in chunks:
        width = min(each for each in backend.capabilities.prefill_widths if each >= count)
        backend.prefill(slot, length, PROMPT[length : length + count], width)
        length += count
    _, heads, capacity, size = backend.cache.shape(1)
    digest = hashlib.sha256()
    for _, address in backend.cache.addresses(slot):
        tensor = np.empty((heads, capacity, size), backend.cache.dtype)
        backend.memory.download(tensor, address)
        digest.update(tensor[:, :length].tobytes())
    return digest.hexdigest()


def read_prompt(bundle: Path, slots: int) -> dict[str, Any]:
    backend = OrtBackend(bundle, read_manifest(bundle), "cpu", threads=1, max_batch_size=slots)
    backend.resize(256, [0] * slots)
    # In chunks first: afterwards the cache has the right entries already.
    in_chunks = entries(backend, slots - 1, CHUNKS)
    whole = entries(backend, slots - 1, [len(PROMPT)])
    backend.close()
    return {
        "same_entries": backend.capabilities.same_entries,
        "in_chunks": in_chunks,
        "whole": whole,
    }


def texts(bundle: Path, slots: int) -> tuple[dict[str, list[int]], int]:
    """Return the tokens by plan and temperature, and the last text's cached prompt tokens."""
    tokens = {}
    with load(bundle, "cpu", threads=1, max_batch_size=slots) as session:
        for temperature, plans in TEXTS[slots].items():
            for plan in plans:
                sampling = SamplingParams(temperature, seed=3)
                options = GenerateOptions(TOKENS, sampling, plan=plan, ignore_eos=True)
                result = session.generate_ids(PROMPT[:PROMPT_TOKENS], options).result()
                tokens[f"{plan} at {temperature}"] = result.token_ids
    return tokens, result.stats.cached_tokens


def run(bundle: Path) -> dict[str, Any]:
    by_slots = {}
    for slots in TEXTS:
        written, cached = texts(bundle, slots)
        by_slots[slots] = {**read_prompt(bundle, slots), "texts": written, "cached": cached}
    with load(bundle, "cpu", threads=1) as session:
        return {"kernels": session.backend.capabilities.kernels, "slots": by_slots}


if __name__ == "__main__":
    print(json.dumps([run(Path(bundle)) for bundle in sys.argv[1:]]))
