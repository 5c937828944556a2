"""The trunks for CUDA: on the CPU provider they compute what trunk.onnx does, with few nodes, and nothing in them keeps
a pass from being captured."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from cuda_kernels import missing_kernels
from host_values import copied_values

import conftest
from conftest import export_bundle, make_model, write_random_weights
from pass_exporter.cli import main
from pass_exporter.derived import cuda
from pass_exporter.derived.cuda import CUDA_PLAIN_FILE, CUDA_TRUNK_FILE, write_trunks_for_cuda
from pass_exporter.export import TRUNK_FILE
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import read_lookahead
from pass_exporter.model.registry import resolve
from pass_exporter.trunk.graph import save
from pass_exporter.trunk.trace import trace_trunk
from pass_runtime.bundle.plan import Plan, make_cycle, prefill_plan
from pass_runtime.bundle.read import read_manifest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from count_nodes import TrunkNodes, count_trunk

OVERRIDES = {"gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}}
PLANS = [*make_cycle("fused", 2).plans, *make_cycle("two-pass", 2).plans, *make_cycle("ar", 0).plans, prefill_plan(30)]
CUDA_FILES = (CUDA_TRUNK_FILE, CUDA_PLAIN_FILE)
LENGTH, CAPACITY = 33, 80
MOST_NODES = {
    "llama": (14, 9),
}
"""By family, the nodes before the layers and in a layer."""


@dataclass(frozen=True)
class Trunks:
    """The graphs of a tiny model with an adapter, in a directory."""

    family: str
    directory: Path

    def run(self, file: str, plan: Plan) -> dict[str, np.ndarray]:
        """Logits and cache after a window that follows LENGTH tokens; the entries after it are junk."""
        options, rng = ort.SessionOptions(), np.random.default_rng(0)
        options.log_severity_level = 3
        session = ort.InferenceSession(self.directory / file, options, providers=["CPUExecutionProvider"])
        vocab_size = conftest.VOCAB_SIZE
        ids = rng.integers(0, vocab_size, (1, plan.width))
        ids[:, plan.width - len(plan.lookahead_rows) :] = plan.lookahead_ids(vocab_size)
        feed = {
            "input_ids": ids,
            "row_position": plan.row_position,
            "window_mask": plan.window_mask,
            "length": np.array([LENGTH]),
            "logit_rows": np.arange(plan.width),
            "lookahead_rows": plan.lookahead_rows,
        }
        for past in session.get_inputs():
            if past.name not in feed:
                _, heads, _, size = past.shape
                feed[past.name] = rng.standard_normal((1, heads, CAPACITY, size), np.float32).astype(np.float16)
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(None, feed), strict=True))


@pytest.fixture(scope="module", params=SUPPORTED_FAMILIES)
def trunks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trunks:
    directory = tmp_path_factory.mktemp(request.param)
    path = make_model(directory / "model", request.param, **OVERRIDES.get(request.param, {}))
    weights = write_random_weights(path, directory / "lookahead.safetensors", 2)
    loaded = load_model(resolve(str(path)), "fp16")
    trunk, _ = trace_trunk(loaded.model, read_lookahead(weights, 2, loaded.model))
    save(trunk, directory / TRUNK_FILE)
    sizes = loaded.geometry
    written = write_trunks_for_cuda(directory / TRUNK_FILE, sizes.vocab_size, sizes.max_capacity, sizes.windows)
    assert tuple(each.file for each in written) == CUDA_FILES
    return Trunks(request.param, directory)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_they_compute_what_the_trunk_does(trunks: Trunks, plan: Plan):
    """As far as fp16 goes; of the cache, the entries up to the window's end."""
    expected = trunks.run(TRUNK_FILE, plan)
    for file in CUDA_FILES if not len(plan.lookahead_rows) else CUDA_FILES[:1]:
        found = trunks.run(file, plan)
        assert expected.keys() == found.keys()
        for name, right in expected.items():
            valid = slice(None) if name == "logits" else slice(LENGTH + plan.width)
            pair = [np.asarray(values, np.float32) for values in (right, found[name])]
            one, other = pair if name == "logits" else (values[:, :, valid] for values in pair)
            assert np.abs(one - other).max() <= 1e-2 * np.abs(one).max(), (file, name)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_rows_that_are_no_lookahead_rows_have_the_bits_of_the_trunk_without_an_adapter(trunks: Trunks, plan: Plan):
    adapted, plain = (trunks.run(file, plan)["logits"] for file in CUDA_FILES)
    others = plan.width - len(plan.lookahead_rows)
    np.testing.assert_array_equal(adapted[:, :others], plain[:, :others])
    assert len(plan.lookahead_rows) == 0 or not np.array_equal(adapted[:, others:], plain[:, others:])


def test_few_nodes(trunks: Trunks):
    adapted, plain = (count_trunk(trunks.directory / file) for file in CUDA_FILES)
    portable = count_trunk(trunks.directory / TRUNK_FILE)
    assert (adapted.prelude, adapted.layer) == MOST_NODES[trunks.family]
    assert (adapted.place, adapted.end) == (3, 4)
    assert plain == TrunkNodes(adapted.total - 3 * 4 - 1, adapted.prelude - 1, adapted.layer, 0, 4)
    assert portable.place == 5 and portable.layer > adapted.layer and portable.prelude > 3 * adapted.prelude


def test_all_nodes_run_on_the_device(trunks: Trunks):
    """None lacks a kernel there, and none reads both sizes, which are on the host, and tensors of the device."""
    for file in (trunks.directory / name for name in CUDA_FILES):
        assert copied_values(file) == [] and missing_kernels(file) == []


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp16 bundle, exported without saying what is for CUDA."""
    directory = tmp_path_factory.mktemp("fp16")
    model = make_model(directory / "model")
    weights = write_random_weights(model, directory / "lookahead.safetensors", 2)
    return export_bundle(model, directory / "bundle", dtype="fp16", lookahead=2, lookahead_weights=weights)


def test_they_are_for_one_sequence_on_cuda(bundle: Path):
    manifest = read_manifest(bundle)
    assert [(each.device, each.batch, each.spare_entries) for each in manifest.derived] == [("cuda", 1, 0)] * 2
    assert manifest.trunk_file("cuda", 1) == CUDA_TRUNK_FILE
    assert manifest.trunk_file("cuda", 1, lookahead_rows=False) == CUDA_PLAIN_FILE
    assert manifest.trunk_file("cuda", 2) == manifest.trunk_file("cpu", 1) == TRUNK_FILE
    assert {*CUDA_FILES} < {*manifest.files}


def test_large_weights_are_not_held_twice(bundle: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda, "PLAIN_MAX_BYTES", 1000)
    manifest = read_manifest(bundle)
    sizes = (manifest.model.vocab_size, manifest.model.max_capacity, [None] * manifest.model.layers)
    assert [each.file for each in write_trunks_for_cuda(bundle / TRUNK_FILE, *sizes)] == [CUDA_TRUNK_FILE]


def test_they_are_made_only_where_they_can_be(tmp_path: Path):
    refused = CliRunner().invoke(main, ["--model", "x", "--cuda-attention", "group-query"])
    assert refused.exit_code == 2 and "is for --dtype fp16" in refused.stderr
    model = make_model(tmp_path / "model", head_dim=20, num_hidden_layers=1)
    assert read_manifest(export_bundle(model, tmp_path / "bundle", dtype="fp16")).derived == ()
    with pytest.raises(Exception, match="cannot compute this model's attention; leave the option out"):
        export_bundle(model, tmp_path / "other", dtype="fp16", cuda_attention="group-query")


def test_they_can_be_left_out(tmp_path: Path):
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    bundle = export_bundle(model, tmp_path / "bundle", dtype="fp16", cuda_attention="attention")
    assert read_manifest(bundle).derived == ()
