"""The portability gate: the operator pattern must keep building in TensorRT-RTX, which needs no GPU for that."""

from pathlib import Path

import pytest

from conftest import export_bundle
from pass_exporter.config import Weights
from pass_exporter.portability import build_graph, tail_profiles, trunk_profiles
from pass_runtime.manifest import Graph, read_manifest
from pass_runtime.sampling import Rule

pytestmark = pytest.mark.tensorrt
pytest.importorskip("tensorrt_rtx", reason="pip install 'pass-toolkit[tensorrt]'")

SMOLLM2_SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def test_tiny_fp32_trunk_builds_for_every_plan_width(tiny_bundle: Path):
    manifest = read_manifest(tiny_bundle)
    assert build_graph(tiny_bundle, manifest.trunk, trunk_profiles(manifest)) > 0


def test_adapted_fp32_trunk_builds_for_every_plan(adapter_bundle: Path):
    """Windows without look-ahead rows included, where the adapter's products are empty."""
    manifest = read_manifest(adapter_bundle)
    profiles = trunk_profiles(manifest, batches=(1,))
    assert {0, 1, 8, 72} <= {profile["lookahead_rows"] for profile in profiles}
    assert build_graph(adapter_bundle, manifest.trunk, profiles) > 0


def test_every_tail_builds(tiny_bundle: Path):
    manifest = read_manifest(tiny_bundle)
    for plan in manifest.plans:
        for graph in plan.tails.values():
            assert build_graph(tiny_bundle, graph, tail_profiles(plan, 513)) > 0, graph.file


@pytest.fixture(scope="module")
def smollm2_shaped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Graph]:
    """A trunk of SmolLM2's shape in fp16 with an adapter: weights do not matter to a builder, so they are random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pass_exporter.bundle import graph_info
    from pass_exporter.graph import save
    from pass_exporter.lookahead import Lookahead
    from pass_exporter.trunk import trace_trunk
    from pass_trainer.drafter import new_adapter

    config = AutoConfig.for_model("llama", **SMOLLM2_SHAPE)
    model = AutoModelForCausalLM.from_config(config).half().eval().requires_grad_(False)
    adapter = new_adapter(model, 32, torch.Generator())
    graph = trace_trunk(model, Lookahead(torch.zeros(4, 576), True, "random", adapter))
    directory = tmp_path_factory.mktemp("smollm2-shaped")
    save(graph, directory / "trunk.onnx")
    return directory, graph_info(graph, "trunk.onnx")


def test_smollm2_shaped_trunk_builds(smollm2_shaped: tuple[Path, Graph]):
    directory, graph = smollm2_shaped
    windows = [(1, 0), (5, 4), (5, 0), (25, 20)]
    decode = [{"batch": 1, "width": width, "logit_rows": width, "lookahead_rows": rows} for width, rows in windows]
    prefill = {"batch": 1, "width": 64, "logit_rows": 1, "lookahead_rows": 0}
    assert build_graph(directory, graph, [*decode, prefill], "SM120") > 0


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_smollm2_sized_tails_build(tmp_path: Path, rule: Rule):
    """TopK over a real vocabulary, and the noise tables, are what a tiny vocabulary would not show."""
    from pass_exporter.bundle import write_tails

    plans = write_tails(tmp_path, lookahead=4, vocab_size=SMOLLM2_SHAPE["vocab_size"], rule=rule)
    for plan in plans[-3:] if rule == "rejection" else (plans[0], *plans[-3:]):
        for sampler, graph in plan.tails.items():
            if rule == "match" or sampler != "greedy":
                assert build_graph(tmp_path, graph, tail_profiles(plan, 8193, (1,))) > 0, graph.file


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_trunk_builds(tiny_model: Path, adapter_weights: Path, tmp_path: Path, weights: Weights):
    """Weights stay packed: DequantizeLinear over blocks."""
    flags = {"lookahead": 2, "weights": weights, "lookahead_weights": adapter_weights}
    bundle = export_bundle(tiny_model, tmp_path / weights, **flags)
    manifest = read_manifest(bundle)
    assert build_graph(bundle, manifest.trunk, trunk_profiles(manifest, batches=(1,))) > 0
