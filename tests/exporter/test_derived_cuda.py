"""The trunk for CUDA with GroupQueryAttention: on the CPU provider it computes what trunk.onnx does, and nothing in it
keeps a pass from being captured."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from host_values import copied_values

from conftest import export_bundle, make_model, write_random_weights
from pass_exporter.cli import main
from pass_exporter.derived.cuda import CUDA_TRUNK_FILE
from pass_runtime.bundle.plan import Plan, make_cycle, prefill_plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS, PAST, cache_names

MODELS = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
}
PLANS = [*make_cycle("fused", 2).plans, *make_cycle("two-pass", 2).plans, *make_cycle("ar", 0).plans, prefill_plan(16)]
LENGTH, CAPACITY = 33, 80


@cache
def opened(file: Path) -> ort.InferenceSession:
    return ort.InferenceSession(file, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module", params=MODELS)
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    model = make_model(directory / "model", request.param, **MODELS[request.param])
    weights = write_random_weights(model, directory / "lookahead.safetensors", 2)
    options = {"dtype": "fp16", "lookahead": 2, "lookahead_weights": weights, "cuda_attention": "group-query"}
    return export_bundle(model, directory / "bundle", **options)


def run(bundle: Path, file: str, plan: Plan) -> dict[str, np.ndarray]:
    """Logits and cache after a window that follows LENGTH tokens; the entries after it are junk."""
    manifest, rng = read_manifest(bundle), np.random.default_rng(0)
    model = manifest.model
    ids = rng.integers(0, model.vocab_size, (1, plan.width))
    ids[:, plan.width - len(plan.lookahead_rows) :] = plan.lookahead_ids(model.vocab_size)
    feed = {
        "input_ids": ids,
        "row_position": plan.row_position,
        "window_mask": plan.window_mask,
        "length": np.array([LENGTH]),
        "logit_rows": np.arange(plan.width),
    }
    if manifest.lookahead.adapter_rank:
        feed[LOOKAHEAD_ROWS] = plan.lookahead_rows
    for name in cache_names(PAST, model.layers):
        shape = (1, model.kv_heads, CAPACITY, model.head_dim)
        feed[name] = rng.standard_normal(shape, np.float32).astype(np.float16)
    session = opened(bundle / file)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feed), strict=True))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_it_computes_what_the_trunk_does(bundle: Path, plan: Plan):
    """As far as fp16 goes; of the cache, the entries up to the window's end."""
    expected, found = run(bundle, "trunk.onnx", plan), run(bundle, CUDA_TRUNK_FILE, plan)
    assert expected.keys() == found.keys()
    for name, right in expected.items():
        valid = slice(None) if name == "logits" else slice(LENGTH + plan.width)
        pair = [np.asarray(values, np.float32) for values in (right, found[name])]
        one, other = pair if name == "logits" else (values[:, :, valid] for values in pair)
        assert np.abs(one - other).max() <= 1e-2 * np.abs(one).max(), name


def test_nothing_in_it_is_copied_between_host_and_device(bundle: Path):
    assert copied_values(bundle / CUDA_TRUNK_FILE) == []
    graph = onnx.load(bundle / CUDA_TRUNK_FILE, load_external_data=False).graph
    operators = [node.op_type for node in graph.node]
    assert operators.count("GroupQueryAttention") == read_manifest(bundle).model.layers
    assert not {"Attention", "TensorScatter", "RotaryEmbedding"} & {*operators}


def test_it_is_for_one_sequence_on_cuda(bundle: Path):
    manifest = read_manifest(bundle)
    (derived,) = manifest.derived
    assert (derived.device, derived.batch, derived.spare_entries) == ("cuda", 1, 0)
    assert (manifest.trunk_file("cuda", 1), manifest.trunk_file("cuda", 2)) == (CUDA_TRUNK_FILE, "trunk.onnx")
    assert manifest.trunk_file("cpu", 1) == "trunk.onnx" and CUDA_TRUNK_FILE in manifest.files


def test_it_is_made_only_where_it_is_asked_for_and_can_be():
    refused = CliRunner().invoke(main, ["--model", "x", "--cuda-attention", "group-query"])
    assert refused.exit_code == 2 and "is for --dtype fp16" in refused.stderr


def test_a_model_whose_heads_it_cannot_rotate_is_refused(tmp_path: Path):
    model = make_model(tmp_path / "model", head_dim=20)
    with pytest.raises(Exception, match="cannot compute this model's attention; leave the option out"):
        export_bundle(model, tmp_path / "bundle", dtype="fp16", cuda_attention="group-query")
