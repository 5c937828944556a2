"""The trunk for CPUs: it computes what the portable trunk does, of few nodes, and a row's bits
depend on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from trunk_graphs import FAMILIES, count, load_graph, make_family, random_feed

from conftest import VOCAB_SIZE, SilentProgress
from pass_exporter.derived.cpu import CPU_FILE, write_trunk_for_cpu
from pass_exporter.export import TRUNK_FILE
from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import mean_embedding
from pass_exporter.model.registry import resolve
from pass_exporter.quantize.rewrite import rewrite
from pass_exporter.quantize.run import quantize
from pass_exporter.quantize.spec import SPECS
from pass_exporter.trunk.graph import move_weights
from pass_exporter.trunk.trace import trace_trunk
from pass_runtime.backends.ort.session import find_kernels, library, open_session
from pass_runtime.bundle.manifest import DerivedTrunk
from pass_runtime.bundle.plan import make_plan
from pass_runtime.bundle.window import Window, prefill_window
from pass_trainer.drafter import ADAPTED_LAYERS

needs_kernels = pytest.mark.skipif(library() is None, reason=f"no CPU kernels: {find_kernels()}")
FORMATS = {"full": 1e-5, "int8": 0.03, "int4": 0.03}
"""The largest relative error of outputs. Products of codes round activations to 8 bits."""
RANK, LOOKAHEAD = 4, 4
NO_ADAPTER: tuple[str, ...] = ()
ALL_LAYERS = ("q_proj", "v_proj", "qkv_proj", "up_proj", "gate_up_proj", *ADAPTED_LAYERS)
"""The last parts of the names of layers that an adapter changes. The layers k and gate, whose
products are joined with those of such layers, have no adapter."""
NODES = {
    "llama": (4, 7, 22),
    "mistral": (4, 7, 22),
    "qwen2": (4, 7, 22),
    "qwen3": (4, 14, 29),
    "phi3": (4, 7, 22),
    "gemma": (4, 7, 22),
    "gemma3_text": (4, 16, 29),
    "olmo2": (3, 12, 25),
}
"""Numbers of nodes by family: all but the layers, a layer, and a layer in the format `full`, whose
products do not take in the adapter."""
WINDOWS = [
    *make_plan("ar", 0).windows,
    *make_plan("fused", 3).windows,
    *make_plan("two-pass", 2).windows,
    prefill_window(16),
    prefill_window(64),
]
ENTRIES = (140, 9)
"""The number of cache entries before the window, for each of two slots."""
by_format = pytest.mark.parametrize("weights", FORMATS)


@dataclass(frozen=True)
class Case:
    family: str
    weights: str
    adapted: Sequence[str] = tuple(ADAPTED_LAYERS)
    settings: tuple[tuple[str, Any], ...] = ()
    shared: bool = True


@dataclass
class Trunks:
    directory: Path
    entry: DerivedTrunk
    sessions: dict[str, ort.InferenceSession] = field(default_factory=dict)

    def run(
        self,
        file: str,
        window: Window,
        slots: Sequence[int] = (0, 1),
        capacity: int = 256,
        rows: Sequence[int] | None = None,
    ) -> dict[str, np.ndarray]:
        session = self.open(file)
        feed = random_feed(session, window, ENTRIES, slots, capacity)
        if rows is not None:
            feed["lookahead_rows"] = np.array(rows, np.int64)
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, feed), strict=True))

    def open(self, file: str) -> ort.InferenceSession:
        if file not in self.sessions:
            exact = file != CPU_FILE  # ONNX Runtime would round activations
            self.sessions[file] = open_session(self.directory / file, "cpu", threads=1, exact=exact)
        return self.sessions[file]

    @cached_property
    def graph(self) -> onnx.GraphProto:
        return load_graph(self.directory / CPU_FILE)

    def node_counts(self) -> tuple[int, int]:
        places = [i for i, node in enumerate(self.graph.node) if node.op_type == "WindowAttention"]
        layer = places[1] - places[0]
        return len(self.graph.node) - layer * len(places), layer


def external_files(graph: Path) -> dict[str, str]:
    return {
        each.name: {entry.key: entry.value for entry in each.external_data}["location"]
        for each in load_graph(graph).initializer
        if each.external_data
    }


def random_adapter(model: torch.nn.Module, layers: Sequence[str]) -> Adapter | None:
    generator, factors = torch.Generator().manual_seed(1), {}
    for name, layer in linear_layers(model).items():
        if name.rpartition(".")[2] in layers:
            a = torch.randn(RANK, layer.in_features, generator=generator)
            b = torch.randn(layer.out_features, RANK, generator=generator)
            factors[name] = (a * 0.2, b * 0.1)
    return Adapter(factors).requires_grad_(False) if factors else None


def derive(directory: Path, case: Case) -> Trunks:
    # Larger weights would enlarge the errors of rounding.
    settings = dict(case.settings) | {"initializer_range": 0.05}
    source = resolve(str(make_family(directory / "model", case.family, **settings)))
    loaded = load_model(source, "fp32")
    lookahead = mean_embedding(loaded.model, LOOKAHEAD)
    generator = torch.Generator().manual_seed(2)
    lookahead = replace(
        lookahead,
        embeddings=torch.randn(lookahead.embeddings.shape, generator=generator) * 0.1,
        adapter=random_adapter(loaded.model, case.adapted),
    )
    spec = replace(SPECS[case.weights], gptq=False)
    quantized = quantize(loaded, lookahead, spec, None, SilentProgress())
    portable, weight_parts = trace_trunk(loaded.model, lookahead)
    for_cpu = portable.clone()
    rewrite(portable, weight_parts, quantized)
    move_weights(portable, directory / TRUNK_FILE)
    ir.save(portable, directory / TRUNK_FILE)
    shared = portable.graph if case.shared else None
    entry = write_trunk_for_cpu(
        for_cpu, directory, weight_parts, quantized, loaded.geometry, shared
    )
    return Trunks(directory, entry)


@pytest.fixture(scope="module")
def trunks(tmp_path_factory: pytest.TempPathFactory, traces: None) -> Callable[..., Trunks]:
    made: dict[Case, Trunks] = {}

    def of(*arguments: Any, **options: Any) -> Trunks:
        case = Case(*arguments, **options)
        if case not in made:
            made[case] = derive(tmp_path_factory.mktemp(case.family), case)
        return made[case]

    return of


Of = Callable[..., Trunks]


def relative_errors(trunks: Trunks, window: Window) -> dict[str, float]:
    portable, derived = (trunks.run(file, window) for file in (TRUNK_FILE, CPU_FILE))
    assert portable.keys() == derived.keys()
    errors = {}
    for name, expected in portable.items():
        difference = derived[name] - expected
        if name != "logits":
            for slot, entries in enumerate(ENTRIES):
                for tensor in (difference, expected):
                    tensor[slot, :, entries + window.width :] = 0
        errors[name] = float(np.linalg.norm(difference) / np.linalg.norm(expected))
    return errors


def check(trunks: Trunks, weights: str) -> None:
    for window in WINDOWS:
        errors = relative_errors(trunks, window)
        assert max(errors.values()) < FORMATS[weights], (window.name, errors)
    check_bits(trunks)


def check_bits(trunks: Trunks) -> None:
    ar, *others = WINDOWS
    expected = trunks.run(CPU_FILE, ar)
    for window in others:
        both = trunks.run(CPU_FILE, window)
        np.testing.assert_array_equal(both["logits"][:, 0], expected["logits"][:, 0])
        for slot, entries in enumerate(ENTRIES):
            end = entries + window.width
            for capacity in (end, end + 5):
                one = trunks.run(CPU_FILE, window, [slot], capacity)
                np.testing.assert_array_equal(one["logits"][0], both["logits"][slot])
                for name in both.keys() - {"logits"}:
                    np.testing.assert_array_equal(one[name][0, :, :end], both[name][slot, :, :end])


families = pytest.mark.parametrize("family", FAMILIES)


@needs_kernels
@by_format
@families
def test_families_compute_what_the_portable_trunk_does(trunks: Of, family: str, weights: str):
    check(trunks(family, weights), weights)


@needs_kernels
@pytest.mark.slow
@by_format
@pytest.mark.parametrize(
    ("adapted", "settings"),
    [
        (NO_ADAPTER, {"tie_word_embeddings": True}),
        (ALL_LAYERS, {"attention_bias": True, "mlp_bias": True}),
        # Heads of k and v that share groups of columns with others; a width that is not rounded.
        (ALL_LAYERS, {"num_key_value_heads": 1, "head_dim": 24, "intermediate_size": 80}),
        (ADAPTED_LAYERS, {"hidden_act": "gelu", "num_key_value_heads": 4}),
    ],
    ids=["tied", "biases", "widths", "gelu"],
)
def test_settings(trunks: Of, adapted: Sequence[str], settings: dict[str, Any], weights: str):
    check(trunks("llama", weights, tuple(adapted), tuple(settings.items())), weights)


@needs_kernels
@by_format
def test_the_adapter_changes_lookahead_rows_alone(trunks: Of, weights: str):
    of, (draft, _) = trunks("llama", weights), make_plan("two-pass", 3).windows
    adapted, plain = (of.run(CPU_FILE, draft, rows=rows)["logits"] for rows in (None, []))
    np.testing.assert_array_equal(adapted[:, 0], plain[:, 0])
    change = np.abs(adapted - plain)[:, 1:].max() / np.abs(plain).max()
    assert change > 4 * FORMATS[weights]
    for length in (1, 2):
        shorter = of.run(CPU_FILE, make_plan("two-pass", length).windows[0])["logits"]
        np.testing.assert_array_equal(shorter, adapted[:, : length + 1])


@by_format
@families
def test_layers_have_few_nodes(trunks: Of, family: str, weights: str):
    of = trunks(family, weights)
    outside, layer, layer_in_full = NODES[family]
    counts = of.node_counts()
    if weights == "full":
        assert counts[1] == layer_in_full
    else:
        assert counts == (outside, layer)
    attentions = count(load_graph(of.directory / TRUNK_FILE), "Attention")
    assert count(of.graph, "WindowAttention") == attentions > 0
    assert not any(
        count(of.graph, op_type)
        for op_type in ("Attention", "TensorScatter", "RotaryEmbedding", "RMSNormalization")
    )


def test_weights_in_float32_are_read_from_the_portable_trunks_file(trunks: Of):
    of = trunks("llama", "full")
    portable, derived = (external_files(of.directory / file) for file in (TRUNK_FILE, CPU_FILE))
    own = {name for name, file in derived.items() if file == f"{CPU_FILE}.data"}
    assert own == {"rotation.cos0", "rotation.sin0"} and derived.keys() - own <= portable.keys()


@needs_kernels
@by_format
def test_the_trunk_can_have_all_weights_in_its_own_file(trunks: Of, weights: str):
    shared, own = (trunks("llama", weights, shared=shared) for shared in (True, False))
    assert {*external_files(own.directory / CPU_FILE).values()} == {f"{CPU_FILE}.data"}
    for window in WINDOWS:
        expected, actual = (each.run(CPU_FILE, window) for each in (shared, own))
        for name, values in expected.items():
            np.testing.assert_array_equal(actual[name], values)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_tied_embeddings_are_read_from_the_codes_of_the_head(trunks: Of, weights: str):
    of = trunks("llama", weights, NO_ADAPTER, (("tie_word_embeddings", True),))
    (embed,) = (node for node in of.graph.node if node.op_type == "EmbedPacked")
    (head,) = (node for node in of.graph.node if node.output[0] == "logits")
    assert head.op_type == "Product" and embed.input[1] == head.input[1]
    assert all(VOCAB_SIZE not in each.dims for each in of.graph.initializer)
