"""Runs tail graphs in ONNX Runtime, for batches of requests."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from aliasing import SHARED

from pass_exporter.tails.match import build_tail
from pass_exporter.tails.rejection import build_rejection_tail
from pass_runtime.bundle.head import HeadArrays
from pass_runtime.bundle.noise import STREAMS, noise_offsets
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.window import Window, bundle_windows, fused_window

LOOKAHEAD = 6
WINDOWS = bundle_windows(LOOKAHEAD)
PRUNED = [  # windows whose groups are smaller than the bundle allows
    fused_window(groups)
    for groups in ((1, 0), (1, 1, 1), (3, 0, 3, 1), (4, 3, 2, 2, 1), (2, 6, 0, 5, 1, 1, 3))
]
POSITIONS = 800
"""The positions that have noise."""
HIDDEN = 16


@lru_cache(maxsize=8)
def random_head(vocab: int) -> HeadArrays:
    rng, rank, width = np.random.default_rng(vocab), 6, 10

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    table = matrix(vocab, rank)
    # With rows of different lengths, the token of the longest row would always have the best logit.
    table = (2 * table / np.linalg.norm(table, axis=1, keepdims=True)).astype(np.float16)
    read = (matrix(HIDDEN, width) / 2, matrix(rank, width))
    layer = (matrix(width, width) / 3, matrix(width) / 4)
    return HeadArrays(table, *read, *layer, matrix(width, rank) / 2)


@lru_cache(maxsize=48)
def tail_session(
    name: str, sampler: str, vocab: int, rule: str, head: bool = False
) -> ort.InferenceSession:
    window = next(window for window in WINDOWS if window.name == name)
    by_rejection = rule == "rejection" and sampler != "greedy" and window.width > 1
    build = build_rejection_tail if by_rejection else build_tail
    return open_graph(build(window, sampler, vocab, random_head(vocab) if head else None))


def open_graph(model: ir.Model) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    data = ir.serde.serialize_model(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def run_graph(session: ort.InferenceSession, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [value.name for value in session.get_outputs()]
    outputs = session.run(names, {i.name: feed[i.name] for i in session.get_inputs()})
    return dict(zip(names, outputs, strict=True))


def run_in_place(
    session: ort.InferenceSession, feed: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Do as `run_graph` does, with outputs in the memory of inputs where the runtime binds them
    so."""
    binding = session.io_binding()
    arrays = {i.name: np.array(feed[i.name]) for i in session.get_inputs()}
    inputs = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    shared = {written: inputs[read] for read, written in SHARED.items() if read in inputs}
    outputs = {}
    for name, value in run_graph(session, feed).items():
        outputs[name] = shared.get(name)
        if outputs[name] is None or tuple(outputs[name].shape()) != value.shape:
            junk = np.full_like(value, 77)
            outputs[name] = ort.OrtValue.ortvalue_from_numpy(junk)
        binding.bind_ortvalue_output(name, outputs[name])
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    session.run_with_iobinding(binding)
    return {name: value.numpy().copy() for name, value in outputs.items()}


def request_feed(params: list[SamplingParams], active=None) -> dict[str, np.ndarray]:
    positions = np.arange(POSITIONS, dtype=np.int64)
    active = np.ones(len(params), np.int64) if active is None else active
    return {
        stream: np.stack([noise_offsets(p.seed or 0, positions, stream) for p in params])
        for stream in STREAMS
    } | {
        "active": np.asarray(active, np.int64),
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_k": np.array([p.top_k for p in params], np.int64),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
    }


def run_tail(
    window: Window,
    sampler: str,
    logits,
    ids,
    length,
    params: list[SamplingParams],
    *,
    active=None,
    rule="match",
    draft_probs=None,
    hidden=None,
    run=run_graph,
) -> dict[str, np.ndarray]:
    vocab = logits.shape[2]
    feed = request_feed(params, active) | {
        "logits": logits,
        "input_ids": ids,
        "length": length,
        "draft_probs": draft_probs,
        "hidden": hidden,
        "draft_rows": window.draft_rows,
        "lookahead_ids": window.lookahead_ids(vocab),
    }
    return run(tail_session(window.tail, sampler, vocab, rule, hidden is not None), feed)
