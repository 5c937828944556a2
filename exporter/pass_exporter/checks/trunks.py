"""Compares the trunks of a bundle with torch, piece by piece: ONNX Runtime copies the weights that
it opens, fp16 as float32 and others packed, and copies of all at once may not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from pass_exporter.checks.torch_cases import Array, Case
from pass_runtime.backends.ort.session import HOW_TO_GET, library, open_session
from pass_runtime.bundle.manifest import Manifest, ModelInfo
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.tensors import HIDDEN_OUTPUT, LOOKAHEAD_ROWS, PAST, cache_names
from pass_runtime.bundle.window import Window
from pass_runtime.errors import PassError

MAX_PIECE_ELEMENTS = 32 << 20
"""Weight elements in a piece, unless a single node has more."""
MIN_ERROR_LIMIT = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 1e-1}
ROUNDING_FACTOR = 16.0
"""The error limit for float32 in units of eps * sqrt(layers * hidden size), the expected error.
SmolLM2 has 0.3 times as much, Qwen2.5-0.5B in int4 4.7 times."""
ROUNDED_WEIGHTS = ("int4", "int8")
"""Formats with which our CPU kernels round activations to 8 bits."""
ROUNDED_LIMIT = 0.25
"""Tiny random models have up to 0.1, with wrong masks or positions 0.7 or more."""
SPARE_ENTRIES = 24


@dataclass(frozen=True)
class Limits:
    """The largest accepted max |onnx - torch| / max |torch|. rounded: of a trunk that rounds
    activations."""

    error: float
    rounded: float


def limits_of(sizes: ModelInfo) -> Limits:
    """Return the limits for a model, quantized or not: torch's weights have the codes' values."""
    error = MIN_ERROR_LIMIT[sizes.dtype]
    if sizes.dtype == "float32":
        roundings = math.sqrt(sizes.layers * sizes.hidden_size)
        error = max(error, ROUNDING_FACTOR * float(np.finfo(np.float32).eps) * roundings)
    return Limits(error, ROUNDED_LIMIT if sizes.weights in ROUNDED_WEIGHTS else error)


def check_trunks(
    bundle: Path, manifest: Manifest, cases: Sequence[Case], limits: Limits
) -> tuple[float, float]:
    """Run `cases` through all trunks that can run here. Return the error closest to its limit, and
    that limit. Raises PassError if one exceeds it, or no trunk can run."""
    without_rows = [case for case in cases if not len(case.window.lookahead_rows)]
    errors: list[tuple[float, float]] = []
    if (bundle / manifest.trunk.file).exists():
        file, limit = bundle / manifest.trunk.file, limits.error
        errors.append((_check_file(file, manifest, cases, limit), limit))
    for derived in manifest.derived:
        on_cpu = derived.device == "cpu"
        if on_cpu and library() is None:
            continue
        fitting = cases if derived.lookahead_rows else without_rows
        file, limit = bundle / derived.file, limits.rounded if on_cpu else limits.error
        # GroupQueryAttention, in trunks for one sequence, may copy only the entries up to the
        # window's end into the new cache.
        all_entries = derived.batch is None
        error = _check_file(file, manifest, fitting, limit, all_entries=all_entries)
        errors.append((error, limit))
    if not errors:
        raise PassError(f"a bundle for CPUs alone cannot be checked without kernels: {HOW_TO_GET}")
    return max(errors, key=lambda each: each[0] / each[1])


def _check_file(
    file: Path,
    manifest: Manifest,
    cases: Sequence[Case],
    limit: float,
    *,
    all_entries: bool = True,
) -> float:
    feeds = [
        trunk_feed(manifest, case.window, case.length, case.input_ids, case.past) for case in cases
    ]
    runs = run_in_pieces(file, feeds)
    errors = [
        _relative_error(case, manifest, [*run.values()], all_entries)
        for case, run in zip(cases, runs, strict=True)
    ]
    worst = int(np.argmax(errors))  # the first NaN if there is one
    error, window = errors[worst], cases[worst].window.name
    if not error <= limit:  # written so that NaN fails
        raise PassError(
            f"{file.name} differs from torch by {error:.2g} (limit {limit:g}) on window {window}; "
            "this model is not exported correctly, please report it"
        )
    return error


def trunk_feed(
    manifest: Manifest, window: Window, length: int, input_ids: Array, past: Sequence[Array]
) -> dict[str, Array]:
    """Return the trunk's inputs by name for a pass of a window [1,Q] after `past`, K/V of `length`
    tokens."""
    feed: dict[str, Array] = {
        "input_ids": input_ids,
        "row_position": window.row_position,
        "window_mask": window.window_mask,
        "length": np.array([length]),
        "logit_rows": np.arange(window.width),
    }
    if any(tensor.name == LOOKAHEAD_ROWS for tensor in manifest.trunk.inputs):
        feed[LOOKAHEAD_ROWS] = window.lookahead_rows
    names = cache_names(PAST, manifest.model.layers)
    return feed | dict(zip(names, _caches(window, past), strict=True))


def _caches(window: Window, past: Sequence[Array]) -> list[Array]:
    """Entries after the text are random, the same in every call: those after the window must
    stay."""
    random, caches = np.random.default_rng(1), []
    for entries in past:
        length = entries.shape[2]
        # All KV capacities are multiples of 4, because TensorRT needs them to be.
        capacity = -(-(length + window.width + SPARE_ENTRIES) // 4) * 4
        shape = (*entries.shape[:2], capacity, entries.shape[3])
        cache = random.standard_normal(shape, np.float32).astype(entries.dtype)
        cache[:, :, :length] = entries
        caches.append(cache)
    return caches


def _relative_error(
    case: Case, manifest: Manifest, outputs: Sequence[Array], all_entries: bool
) -> float:
    rows = [case.logits]
    if any(tensor.name == HIDDEN_OUTPUT for tensor in manifest.trunk.outputs):
        rows.append(case.hidden[:, case.window.lookahead_rows])
    errors = [
        _error(output, expected)
        for output, expected in zip(outputs, rows, strict=False)  # the cache follows
        if expected.size
    ]
    window_end = case.length + case.window.width
    compared = slice(None if all_entries else window_end)
    for after, expected, window in zip(
        outputs[len(rows) :], _caches(case.window, case.past), case.window_cache, strict=True
    ):
        expected[:, :, case.length : window_end] = window
        errors.append(_error(after[:, :, compared], expected[:, :, compared]))
    return float(np.max(errors))  # NaN if an error is, unlike Python's `max`


def _error(actual: Array, expected: Array) -> float:
    difference = np.abs(actual.astype(np.float32) - expected.astype(np.float32)).max()
    return float(difference / max(np.abs(expected.astype(np.float32)).max(), 1e-6))


def run_in_pieces(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Run a graph for each of `feeds`, inputs by name. Return the outputs of each by name, in
    order.

    Nodes that depend on constants alone run once. bf16, which CPUs have no kernels for, becomes
    float32.
    """
    graph = _Graph(path)
    arrays_of_feeds = [dict(feed) for feed in feeds]  # inputs, and what the pieces so far computed
    for nodes in graph.pieces():
        constant = graph.constant_nodes(nodes)
        (weights,) = graph.run(constant, [{}])
        varying = [node for node in nodes if node not in constant]
        results = graph.run(varying, [arrays | weights for arrays in arrays_of_feeds])
        # Other weights are no longer needed: nodes of this piece alone read them.
        read_later = {value.name for value in graph.results(nodes)}
        kept_weights = {name: array for name, array in weights.items() if name in read_later}
        for arrays, result in zip(arrays_of_feeds, results, strict=True):
            arrays |= result | kept_weights
    outputs = [str(value.name) for value in graph.model.graph.outputs]
    return [{name: arrays[name] for name in outputs} for arrays in arrays_of_feeds]


class _Graph:
    """A graph of which some nodes run at a time. narrow: weights in bf16, which pieces get as
    inputs."""

    def __init__(self, path: Path) -> None:
        self.path, self.model = path, ir.load(path)
        self.files = OpenFiles(path.parent, [each.name for each in path.parent.glob("*.data")])
        self.narrow: dict[ir.Value, ir.TensorProtocol] = {}
        graph = self.model.graph
        for value in (*graph.inputs, *graph.initializers.values()):
            if value.dtype == ir.DataType.BFLOAT16:
                value.dtype = ir.DataType.FLOAT
                if value.const_value is not None:
                    self.narrow[value], value.const_value = value.const_value, None
                    graph.initializers.pop(str(value.name))
                    graph.inputs.append(value)
        for node in graph:
            target = node.attributes.get("to")
            if target is not None and target.as_int() == ir.DataType.BFLOAT16:
                node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT)
            for output in node.outputs:
                if output.dtype == ir.DataType.BFLOAT16:
                    output.dtype = ir.DataType.FLOAT

    def weight(self, value: ir.Value | None) -> ir.TensorProtocol | None:
        return None if value is None else self.narrow.get(value, value.const_value)

    def pieces(self) -> Iterator[Sequence[ir.Node]]:
        nodes = list(self.model.graph)
        start, sizes = 0, dict[ir.Value | None, int]()
        for index, node in enumerate(nodes):
            own = {
                value: weight.size
                for value in node.inputs
                if (weight := self.weight(value)) is not None
            }
            if own and index > start and sum((sizes | own).values()) > MAX_PIECE_ELEMENTS:
                yield nodes[start:index]
                start, sizes = index, {}
            sizes |= own
        yield nodes[start:]

    def constant_nodes(self, nodes: Sequence[ir.Node]) -> dict[ir.Node, None]:
        constant: dict[ir.Node, None] = {}
        for node in nodes:
            inputs = [value for value in node.inputs if value is not None]
            if all(
                self.weight(value) is not None or value.producer() in constant for value in inputs
            ):
                constant[node] = None
        return constant

    def results(self, nodes: Collection[ir.Node]) -> list[ir.Value]:
        """Return the outputs of `nodes` that other nodes read, or that are the model's."""
        inside, model_outputs = set(nodes), set(self.model.graph.outputs)
        return [
            value
            for node in nodes
            for value in node.outputs
            if value in model_outputs or any(use.node not in inside for use in value.uses())
        ]

    def run(
        self, nodes: Collection[ir.Node], feeds: Sequence[Mapping[str, Array]]
    ) -> list[dict[str, Array]]:
        if not nodes:
            return [{} for _ in feeds]
        inside = set(nodes)
        read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
        inputs = [
            value for value in read if value.const_value is None and value.producer() not in inside
        ]
        widened = {
            str(value.name): self.narrow[value].numpy().astype(np.float32)
            for value in inputs
            if value in self.narrow
        }
        feeds = [{**feed, **widened} for feed in feeds]
        for value in inputs:
            value.dtype = ir.DataType.from_numpy(feeds[0][str(value.name)].dtype)
        results = self.results(nodes)
        piece = ir.convenience.extract(self.model.graph, inputs, results)
        proto = ir.to_proto(ir.Model(piece, ir_version=self.model.ir_version))
        self.files.graphs[self.path.name] = proto.SerializeToString()
        # Fused kernels would round to 8 bits.
        session = open_session(self.path, "cpu", exact=True, files=self.files)
        names = [str(value.name) for value in results]
        needed = [each.name for each in session.get_inputs()]
        runs = (session.run(names, {name: feed[name] for name in needed}) for feed in feeds)
        # Copied, because the arrays may be views that keep the session in memory.
        return [
            {name: array.copy() for name, array in zip(names, run, strict=True)} for run in runs
        ]
