"""Runs trunks on random tokens, and counts the operators of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from conftest import VOCAB_SIZE, make_model, randomize_vectors
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_runtime.bundle.window import Window
from trunk_feeds import trunk_feed

FAMILIES = [
    pytest.param(family, marks=[] if family == "llama" else [pytest.mark.slow])
    for family in SUPPORTED_FAMILIES
]
CHANGED_SETTINGS = {
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
}
ORT_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def make_family(directory: Path, family: str, **settings: Any) -> Path:
    """Save a tiny model whose norms and biases are random, too."""
    make_model(directory, family, **CHANGED_SETTINGS.get(family, {}) | settings)
    randomize_vectors(directory)
    return directory


def random_feed(
    session: ort.InferenceSession,
    window: Window,
    lengths: Sequence[int],
    slots: Sequence[int],
    capacity: int,
) -> dict[str, np.ndarray]:
    """Return random inputs for some of the slots with `lengths` cache entries: a slot's inputs
    depend neither on the other slots nor on the capacity."""
    rng = np.random.default_rng(0)
    tokens, past = rng.integers(0, VOCAB_SIZE, (len(lengths), 64))[list(slots)], []
    for value in session.get_inputs():
        if value.name.startswith("past_"):
            heads, size = value.shape[1], value.shape[3]
            entries = rng.standard_normal((len(lengths), heads, max(lengths), size))
            past.append(np.zeros((len(slots), heads, capacity, size), ORT_TYPES[value.type]))
            for cache, slot in zip(past[-1], slots, strict=True):
                cache[:, : lengths[slot]] = entries[slot, :, : lengths[slot]].astype(np.float16)
    return trunk_feed(session, window, tokens, [lengths[slot] for slot in slots], past)


def load_graph(file: Path) -> onnx.GraphProto:
    return onnx.load(file, load_external_data=False).graph


def count(graph: onnx.GraphProto, op_type: str) -> int:
    return sum(node.op_type == op_type for node in graph.node)


def optimized_graph(file: Path, directory: Path) -> onnx.GraphProto:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(directory / "optimized.onnx")
    ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return load_graph(directory / "optimized.onnx")
