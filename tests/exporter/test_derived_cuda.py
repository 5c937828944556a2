"""The trunks for CUDA: on the CPU provider they compute what trunk.onnx does, with few nodes, and
nothing in them keeps a pass from being captured."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from cuda_kernels import missing_kernels
from host_values import copied_values

import conftest
from conftest import export_bundle, make_model, randomize_vectors, write_random_weights
from pass_exporter.cli import main
from pass_exporter.derived import cuda
from pass_exporter.derived.cuda import write_trunks_for_cuda
from pass_exporter.export import TRUNK_FILE
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import read_lookahead
from pass_exporter.model.registry import resolve
from pass_exporter.trunk.graph import OPSET, save
from pass_exporter.trunk.trace import trace_trunk
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.backends.ort.trunks import open_trunk
from pass_runtime.bundle.plan import Plan, make_cycle, prefill_plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.measuring.lossless import first_difference, run_tokens
from pass_runtime.options import GenerateOptions, LoadOptions
from pass_runtime.session import load_verified

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from count_nodes import TrunkNodes, count_trunk

OVERRIDES = {
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
}
PLANS = [
    *make_cycle("fused", 2).plans,
    *make_cycle("two-pass", 2).plans,
    *make_cycle("ar", 0).plans,
    prefill_plan(30),
]
SINGLE, BATCHED = (
    ("trunk.cuda.one.onnx", "trunk.cuda.one.plain.onnx"),
    ("trunk.cuda.onnx", "trunk.cuda.plain.onnx"),
)
"""The files for one sequence and for batches: with the adapter, and without."""
BATCHES = {SINGLE: 1, BATCHED: 2}
LENGTHS, CAPACITY = (33, 20), 80
EXACT_FILE = "trunk.fp32.onnx"
NODES = {
    "llama": (14, 9, 18),
    "mistral": (14, 9, 18),
    "qwen2": (14, 10, 19),
    "qwen3": (14, 16, 24),
    "phi3": (14, 9, 18),
    "gemma": (16, 10, 19),
    "gemma3_text": (22, 19, 27),
    "olmo2": (14, 14, 26),
}
"""By family, the nodes before the layers and in a layer, for one sequence, and those in a layer for
batches."""


@dataclass(frozen=True)
class Trunks:
    """The graphs of a tiny model with an adapter, in a directory."""

    family: str
    directory: Path

    def run(
        self, file: str, plan: Plan, batch: int = 1, *, adapter: bool = True
    ) -> dict[str, np.ndarray]:
        """Logits and cache after a window that follows LENGTHS tokens; the entries after it are
        junk.

        adapter: False makes every B of the adapter 0.
        """
        options, rng = ort.SessionOptions(), np.random.default_rng(0)
        options.log_severity_level = 3
        if not adapter:
            file = self.without_adapter(file)
        session = ort.InferenceSession(
            self.directory / file, options, providers=["CPUExecutionProvider"]
        )
        vocab_size = conftest.VOCAB_SIZE
        ids = rng.integers(0, vocab_size, (batch, plan.width))
        ids[:, plan.width - len(plan.lookahead_rows) :] = plan.lookahead_ids(vocab_size)
        feed = {
            "input_ids": ids,
            "row_position": plan.row_position,
            "window_mask": plan.window_mask,
            "length": np.array(LENGTHS[:batch]),
            "logit_rows": np.arange(plan.width),
            "lookahead_rows": plan.lookahead_rows,
        }
        for past in session.get_inputs():
            if past.name not in feed:
                _, heads, _, size = past.shape
                entries = rng.standard_normal((batch, heads, CAPACITY, size), np.float32).astype(
                    np.float16
                )
                feed[past.name] = (
                    entries if past.type == "tensor(float16)" else entries.astype(np.float32)
                )
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, feed), strict=True))

    def without_adapter(self, file: str) -> str:
        """The name of a copy of a graph in which every B of the adapter is 0."""
        model = ir.load(self.directory / file)
        for name, value in model.graph.initializers.items():
            if "lora_B" in name and value.const_value is not None:
                value.const_value = ir.tensor(np.zeros_like(value.const_value.numpy()), name=name)
        ir.save(model, self.directory / f"zeroed.{file}")
        return f"zeroed.{file}"


@pytest.fixture(scope="module", params=SUPPORTED_FAMILIES)
def trunks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trunks:
    directory = tmp_path_factory.mktemp(request.param)
    path = make_model(directory / "model", request.param, **OVERRIDES.get(request.param, {}))
    randomize_vectors(path)
    weights = write_random_weights(path, directory / "lookahead.safetensors", 2)
    for dtype, file in (("fp32", EXACT_FILE), ("fp16", TRUNK_FILE)):
        loaded = load_model(resolve(str(path)), dtype)
        trunk, _ = trace_trunk(loaded.model, read_lookahead(weights, 2, loaded.model))
        save(trunk, directory / file)
    sizes = loaded.geometry
    written = write_trunks_for_cuda(
        trunk, directory, sizes.vocab_size, sizes.max_capacity, sizes.windows
    )
    assert tuple(each.file for each in written) == (*SINGLE, *BATCHED)
    return Trunks(request.param, directory)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
@pytest.mark.parametrize("files", BATCHES, ids=["one", "batch"])
def test_they_compute_what_the_trunk_does(trunks: Trunks, files: tuple[str, str], plan: Plan):
    """They are as near as the fp16 trunk to what the trunk computes in fp32; of the cache, the
    entries up to the end of the window. An error of such a graph is far larger than rounding."""
    batch = BATCHES[files]
    exact, rounded = (trunks.run(file, plan, batch) for file in (EXACT_FILE, TRUNK_FILE))
    for file in files[:1] if len(plan.lookahead_rows) else files:
        found = trunks.run(file, plan, batch)
        assert exact.keys() == found.keys()
        for name, right in exact.items():
            end = None if name == "logits" else min(LENGTHS[:batch]) + plan.width
            errors = [
                np.square(values[name][:, :, :end] - right[:, :, :end]).mean()
                for values in (rounded, found)
            ]
            scale = np.square(right[:, :, :end]).mean()
            assert errors[1] <= 4 * errors[0] + 1e-6 * scale, (
                file,
                name,
            )  # squares: twice the trunk's error


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
@pytest.mark.parametrize("files", BATCHES, ids=["one", "batch"])
def test_rows_that_are_no_lookahead_rows_keep_their_bits(
    trunks: Trunks, files: tuple[str, str], plan: Plan
):
    """Those that they have without an adapter."""
    batch = BATCHES[files]
    adapted, zeroed = (
        trunks.run(files[0], plan, batch, adapter=adapter)["logits"] for adapter in (True, False)
    )
    others = plan.width - len(plan.lookahead_rows)
    np.testing.assert_array_equal(adapted[:, :others], zeroed[:, :others])
    assert len(plan.lookahead_rows) == 0 or not np.array_equal(
        adapted[:, others:], zeroed[:, others:]
    )
    # The CPU computes float16 in float32, and does not round between two nodes without kernels for
    # float16. OLMo2's two graphs have different ones: the norm after GatedAdd follows the product
    # itself in the plain one.
    if trunks.family != "olmo2":
        plain = trunks.run(files[1], plan, batch)["logits"]
        np.testing.assert_array_equal(adapted[:, :others], plain[:, :others])


def test_few_nodes(trunks: Trunks):
    adapted, plain, batched, _ = (
        count_trunk(trunks.directory / file) for file in (*SINGLE, *BATCHED)
    )
    portable = count_trunk(trunks.directory / TRUNK_FILE)
    assert (adapted.prelude, adapted.layer, batched.layer) == NODES[trunks.family]
    assert adapted.place == batched.place == 3 and portable.place == 5 and adapted.end <= 4
    assert plain == TrunkNodes(
        adapted.total - 3 * 4 - 1, adapted.prelude - 1, adapted.layer, 0, adapted.end
    )
    assert batched.prelude < portable.prelude and batched.layer < portable.layer


def test_all_nodes_run_on_the_device(trunks: Trunks):
    """None lacks a kernel there, and none reads both sizes, which are on the host, and tensors of
    the device."""
    for file in (trunks.directory / name for name in (*SINGLE, *BATCHED)):
        assert copied_values(file) == [] and missing_kernels(file) == []


def test_why_batches_have_another_attention():
    """If this fails, ONNX Runtime has learned it, and the trunks for one sequence could serve
    batches too."""
    feed = {
        "rows": np.zeros((2, 3, 3 * 16), np.float32),
        "keys": np.zeros((2, 1, 8, 16), np.float32),
        "values": np.zeros((2, 1, 8, 16), np.float32),
        "last": np.full(2, 5, np.int32),
        "total": np.array(8, np.int32),
    }
    inputs = [
        ir.Value(
            name=name,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        )
        for name, array in feed.items()
    ]
    operands = [inputs[0], None, None, *inputs[1:]]
    attributes = {"num_heads": 1, "kv_num_heads": 1}
    node = ir.node(
        "GroupQueryAttention", operands, attributes, domain="com.microsoft", num_outputs=3
    )
    result = node.outputs[0]
    result.name, result.type = "result", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        inputs, [result], nodes=[node], opset_imports={"": OPSET, "com.microsoft": 1}, name="one"
    )
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match="batch_size must be 1 when sequence_length > 1"):
        session.run(None, feed)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp16 bundle, exported without saying what is for CUDA."""
    directory = tmp_path_factory.mktemp("fp16")
    model = make_model(directory / "model")
    weights = write_random_weights(model, directory / "lookahead.safetensors", 2)
    return export_bundle(
        model, directory / "bundle", dtype="fp16", lookahead=2, lookahead_weights=weights
    )


def test_each_is_for_its_number_of_slots(bundle: Path):
    manifest = read_manifest(bundle)
    assert [(each.device, each.batch) for each in manifest.derived] == [("cuda", 1)] * 2 + [
        ("cuda", None)
    ] * 2
    assert not any(each.spare_entries for each in manifest.derived)
    for files, slots in BATCHES.items():
        assert files == tuple(
            manifest.trunk_file("cuda", slots, lookahead_rows=rows) for rows in (True, False)
        )
    assert manifest.trunk_file("cpu", 1) == TRUNK_FILE and {*SINGLE, *BATCHED} < {*manifest.files}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of sessions on CUDA, which are opened on the CPU."""
    files: list[str] = []

    def open_on_cpu(path: Path, device: str, *_: object, **__: object) -> ort.InferenceSession:
        assert device == "cuda"
        files.append(path.name)
        return open_session(path, "cpu", threads=1)

    monkeypatch.setattr("pass_runtime.backends.ort.trunks.open_session", open_on_cpu)
    return files


@pytest.mark.parametrize("files", BATCHES, ids=["one", "batch"])
def test_a_session_opens_the_one_with_the_adapter_when_lookahead_rows_come(
    bundle: Path, opened: list[str], files: tuple[str, str]
):
    (ar,), (fused,) = make_cycle("ar", 0).plans, make_cycle("fused", 2).plans
    trunks = open_trunk(bundle, read_manifest(bundle), "cuda", slots=BATCHES[files], threads=1)
    assert trunks.of(ar).file == files[1] and opened == [files[1]]
    assert trunks.of(fused).file == files[0] and opened == [files[1], files[0]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_plan_writes_the_text_of_plain_decoding(
    bundle: Path, opened: list[str], temperature: float
):
    manifest, prompt = read_manifest(bundle), [5, 6, 7, 8]
    backend = OrtBackend(
        bundle, manifest, trunks=open_trunk(bundle, manifest, "cuda", slots=1, threads=1)
    )
    with load_verified(bundle, manifest, LoadOptions("cpu"), backend=backend) as session:
        options = [
            GenerateOptions(40, SamplingParams(temperature, seed=1), plan=plan, ignore_eos=True)
            for plan in ("ar", "two-pass", "fused")
        ]
        plain, *others = (run_tokens(session, prompt, each).token_ids for each in options)
        for each, tokens in zip(options[1:], others, strict=True):
            difference = first_difference(session, prompt, each, plain, tokens)
            assert difference is None or difference.is_near_tie
    assert opened == [*reversed(SINGLE)]


def test_large_weights_are_not_held_twice(bundle: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "PLAIN_MAX_BYTES", 1000)
    manifest = read_manifest(bundle)
    sizes = (manifest.model.vocab_size, manifest.model.max_capacity, [None] * manifest.model.layers)
    derived = write_trunks_for_cuda(ir.load(bundle / TRUNK_FILE), bundle, *sizes)
    assert [each.file for each in derived] == [SINGLE[0], BATCHED[0]]


def test_they_are_made_only_where_they_can_be(tmp_path: Path):
    refused = CliRunner().invoke(main, ["--model", "x", "--cuda-attention", "group-query"])
    assert refused.exit_code == 2 and "is for --dtype fp16" in refused.stderr
    model = make_model(tmp_path / "model", head_dim=20, num_hidden_layers=1)
    assert read_manifest(export_bundle(model, tmp_path / "bundle", dtype="fp16")).derived == ()
    with pytest.raises(
        Exception, match="cannot compute this model's attention; leave the option out"
    ):
        export_bundle(model, tmp_path / "other", dtype="fp16", cuda_attention="group-query")


def test_they_can_be_left_out(tmp_path: Path):
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    bundle = export_bundle(model, tmp_path / "bundle", dtype="fp16", cuda_attention="attention")
    assert read_manifest(bundle).derived == ()
