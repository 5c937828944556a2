from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import SilentProgress, export_bundle, make_model, random_head, write_random_weights
from pass_exporter.config import EngineConfig
from pass_exporter.engines.build import build_engines
from pass_exporter.engines.builder import EngineBuilder, Source
from pass_exporter.engines.profiles import engine_windows, tail_profiles, trunk_profiles
from pass_exporter.engines.target import MIN_COMPUTE_CAPABILITY
from pass_exporter.engines.tensorrt_graphs import (
    aliases,
    tail_for_tensorrt,
    trunk_for_tensorrt,
)
from pass_exporter.progress import Step
from pass_exporter.tails.match import build_tail
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.integrity import file_info, verify_files
from pass_runtime.bundle.manifest import Graph, Profile
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SAMPLERS, TOKEN_LIST_SIZES, Rule
from pass_runtime.bundle.tensors import COLUMNS
from pass_runtime.bundle.window import fused_window

pytestmark = pytest.mark.tensorrt
pytest.importorskip("tensorrt_rtx", reason="pip install 'pass-toolkit[tensorrt-rtx]'")

RTX = LIBRARIES["tensorrt-rtx"]
FORMATS = {
    "fp32": {},
    "fp16": {"dtype": "fp16"},
    "bf16": {"dtype": "bf16"},
    "int4": {"dtype": "fp16", "weights": "int4"},
    "fp8": {"dtype": "fp16", "weights": "fp8"},
    "int8": {"dtype": "fp16", "weights": "int8"},
}
SMOLLM2_SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def no_report(_done: int, _steps: int) -> None:
    pass


def build(path: Path, graph: Graph, profiles: tuple[Profile, ...], target: str = "sm120") -> bytes:
    source = Source(graph, path.read_bytes(), path, profiles)
    return EngineBuilder(RTX, (target,)).build(source, no_report)


@pytest.fixture(scope="module")
def tails_built_once() -> Iterator[None]:
    """Build each tail once, since the tails of all formats are the same graphs."""
    build, built = EngineBuilder.build, dict[tuple[bytes, str, tuple[str, ...]], bytes]()

    def build_once(self: EngineBuilder, source: Source, step: Step) -> bytes:
        if source.aliases:  # a trunk, whose weights are not in `model`
            return build(self, source, step)
        key = (source.model, repr(source.profiles), self._targets)
        if key not in built:
            built[key] = build(self, source, step)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineBuilder, "build", build_once)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("tails_built_once")
@pytest.mark.parametrize("kind", FORMATS)
def test_bundles_build_for_every_target(
    tiny_model: Path, adapter_weights: Path, tmp_path: Path, kind: str
):
    bundle = export_bundle(
        tiny_model, tmp_path / kind, lookahead=2, lookahead_weights=adapter_weights, **FORMATS[kind]
    )
    manifest = read_manifest(bundle)
    min_capability = max(
        MIN_COMPUTE_CAPABILITY.get(name, 0)
        for name in (manifest.model.dtype, manifest.model.weights)
    )
    targets = tuple(target for target in RTX.targets if int(target[2:]) >= min_capability)
    batches = (1, 4) if kind == "fp16" else (1,)
    config = EngineConfig("tensorrt-rtx", max_batch_size=batches[-1], compute_capability=targets)
    built = build_engines(bundle, config, SilentProgress()).engines
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    assert manifest.engines == (built,)
    assert built.targets == targets
    assert built.capacities == (512, 768)
    graphs = [
        manifest.window(window.tail).tails[sampler].file
        for window in engine_windows(manifest)
        for sampler in SAMPLERS
    ]
    assert [engine.graph for engine in built.engines] == [
        *graphs,
        manifest.logprobs.file,
        manifest.processors.file,
        "trunk.onnx",
    ]
    for engine in built.engines:
        info = file_info(built.path(bundle) / engine.file)
        assert (engine.sha256, engine.bytes) == (info.sha256, info.bytes)
    *_, logprobs, processors, trunk = built.engines
    caches = [
        f"{part}.{layer}" for part in ("key", "value") for layer in range(manifest.model.layers)
    ]
    assert trunk.aliases == {f"present_{name}": f"past_{name}" for name in caches}
    assert {32, 256} <= {profile.sizes["width"][0] for profile in trunk.profiles}  # of a prefill
    for batch in batches:
        for columns in built.capacities:
            for window in engine_windows(manifest):
                sizes = {
                    "batch": batch,
                    "columns": columns,
                    "lookahead_rows": len(window.lookahead_rows),
                }
                sizes |= {"width": max(window.width, RTX.least_width), "logit_rows": window.width}
                assert any(profile.admits(sizes) for profile in trunk.profiles), (
                    window.name,
                    sizes,
                )
                emitting = sizes | {"width": window.width, "max_emitted": window.max_emitted}
                assert any(profile.admits(emitting) for profile in logprobs.profiles), window.name
                lists = emitting | {"processed_rows": window.drafts + 1}
                for size in TOKEN_LIST_SIZES:
                    assert any(p.admits(lists | {"touched": size}) for p in processors.profiles)


def test_a_tail_for_a_vocabulary_with_an_incomplete_last_block_builds(tmp_path: Path):
    """GPT-2's vocabulary: its likeliest tokens are not found by the likeliest blocks first."""
    import onnx_ir as ir

    from pass_exporter.bundle import graph_info

    path = tmp_path / "tail.onnx"
    ir.save(build_tail(fused_window([2, 2, 2]), "truncated", 50_257), path)
    graph = graph_info(ir.load(path), path.name)
    sizes = {"batch": (1, 2, 4), "positions": (800, 800, 800)}
    sizes |= {"width": (9, 9, 9), "lookahead_rows": (6, 6, 6)}
    assert build(path, graph, (Profile(sizes=sizes),), "sm89")


@pytest.fixture(scope="module")
def smollm2_shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pass_exporter.model.lookahead import LookaheadWeights
    from pass_exporter.trunk.graph import save
    from pass_exporter.trunk.trace import trace_trunk
    from pass_trainer.drafter import new_adapter

    config = AutoConfig.for_model("llama", **SMOLLM2_SHAPE)
    model = AutoModelForCausalLM.from_config(config).half().eval().requires_grad_(False)
    adapter = new_adapter(model, 32, torch.Generator())
    graph, _ = trace_trunk(model, LookaheadWeights(torch.zeros(4, 576), True, "random", adapter))
    path = tmp_path_factory.mktemp("smollm2-shaped") / "trunk.onnx"
    save(graph, path)
    return path


@pytest.mark.slow
def test_the_trunk_engine_holds_one_copy_of_the_weights(smollm2_shaped: Path):
    import onnx_ir as ir

    from pass_exporter.bundle import graph_info

    graph = graph_info(ir.load(smollm2_shaped), "trunk.onnx")
    windows = [(2, 1, 0), (5, 5, 4), (5, 5, 0), (25, 25, 20), (256, 1, 0)]
    profiles = tuple(
        Profile(
            sizes={
                name: (n, n, n)
                for name, n in zip(("width", "logit_rows", "lookahead_rows"), window, strict=True)
            }
            | {"batch": (1, 1, 1), COLUMNS: (512, 512, 512)}
        )
        for window in windows
    )

    model = trunk_for_tensorrt(smollm2_shaped, 2048)
    source = Source(graph, model, smollm2_shaped, profiles, aliases(smollm2_shaped))
    engine = EngineBuilder(RTX, ("sm120",)).build(source, no_report)
    weights = smollm2_shaped.with_name("trunk.onnx.data").stat().st_size
    assert weights < len(engine) < 1.5 * weights


@pytest.mark.slow
@pytest.mark.parametrize("with_head", [False, True], ids=["", "head"])
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_smollm2_sized_tails_build(tmp_path: Path, rule: Rule, with_head: bool):
    """A tiny vocabulary would not show whether TopK over a real one and the tables of noise
    build."""
    import torch

    from pass_exporter.bundle import write_tails
    from pass_runtime.bundle.window import bundle_windows

    vocab, hidden = (SMOLLM2_SHAPE[name] for name in ("vocab_size", "hidden_size"))
    head = random_head(torch.randn(vocab, hidden), rank=96, width=384) if with_head else None
    infos = write_tails(tmp_path, lookahead=4, vocab_size=vocab, rule=rule, draft_head=head)
    windows = {window.name: window for window in bundle_windows(4)}
    names = {"draft-4", "fused-4"}
    if not with_head:
        names |= {"verify-4"} if rule == "rejection" else {"ar", "verify-4", "copy-16"}
    tails = [
        (windows[info.name], graph)
        for info in infos
        if info.name in names
        for sampler, graph in info.tails.items()
        if rule == "match" or sampler != "greedy"  # both rules have one greedy tail
    ]
    least_bytes = 2 * vocab * 96 if with_head else 1  # of the head's table
    for window, graph in tails:
        path = tmp_path / graph.file
        profiles = tail_profiles(window, 8192, max_batch_size=4)
        model = tail_for_tensorrt(path, window, RTX.least_width)
        source = Source(graph, model, path, profiles)
        built = EngineBuilder(RTX, ("sm120",)).build(source, no_report)
        assert len(built) >= least_bytes, graph.file


def test_the_logprobs_graph_builds(tmp_path: Path):
    """It has a TopK, and a slice whose length is that of another input."""
    from pass_exporter.bundle import write_graph
    from pass_exporter.tails.outputs import build_logprobs
    from pass_runtime.bundle.window import bundle_windows

    path = tmp_path / "tail.logprobs.onnx"
    graph = write_graph(build_logprobs(SMOLLM2_SHAPE["vocab_size"]), path)
    windows = [
        (batch, window.width, window.max_emitted)
        for window in bundle_windows(4)[-5:]
        for batch in (1, 4)
    ]
    profiles = tuple(
        Profile(sizes={"batch": (b, b, b), "width": (w, w, w), "max_emitted": (e, e, e)})
        for b, w, e in windows
    )
    assert build(path, graph, profiles)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.seldom), 4], ids=["head", "adapter and head"]
)
def test_bundles_with_a_draft_head_build(tmp_path: Path, rank: int):
    """The trunk has an output of hidden states, also for windows without look-ahead rows."""
    model = make_model(tmp_path / "model", vocab_size=1024)
    weights = write_random_weights(model, tmp_path / "lookahead.safetensors", 2, rank, head_rank=12)
    bundle = export_bundle(
        model, tmp_path / "bundle", lookahead=2, lookahead_weights=weights, dtype="fp16"
    )
    built = build_engines(
        bundle,
        EngineConfig("tensorrt-rtx", max_batch_size=4, compute_capability=("sm89",)),
        SilentProgress(),
    ).engines
    manifest = read_manifest(bundle)
    assert manifest.engines == (built,) and manifest.lookahead.head is not None
    trunk = built.engines[-1]
    assert {profile.sizes["lookahead_rows"][0] for profile in trunk.profiles} == {0, 2, 6}


def test_trunk_profiles_without_an_adapter_are_fewer(tiny_bundle: Path, adapter_bundle: Path):
    """Without an adapter, one profile serves the windows that draft and those that only verify."""
    counts = [
        len(trunk_profiles(read_manifest(bundle), (512,)))
        for bundle in (tiny_bundle, adapter_bundle)
    ]
    assert counts == [7, 7]
