"""The manifest describes the files of a bundle as ONNX Runtime and the file system see them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnxruntime as ort
import pytest

from conftest import BOS, CHAT_TEMPLATE, EOS, VOCAB_SIZE, export_bundle, make_tokenizer
from pass_exporter.bundle import write_tokenizer
from pass_exporter.checks.verify import limits_of
from pass_exporter.model.registry import WheelFile, registry
from pass_runtime import GenerateOptions, Manifest, PassError, SamplingParams, load, read_manifest
from pass_runtime.bundle.bindings import fed_input
from pass_runtime.bundle.plan import bundle_plans
from pass_runtime.measuring.lossless import run_tokens
from same_text import assert_same_text

ORT_TYPES = {
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(bool)": "bool",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
}


@pytest.fixture(scope="module")
def manifest(tiny_bundle: Path) -> Manifest:
    return read_manifest(tiny_bundle)


@pytest.fixture(scope="module")
def half_bundle(in_format: Callable[[str], Path]) -> Path:
    return in_format("fp16")


def test_every_file_is_listed_with_its_hash(tiny_bundle: Path, manifest: Manifest):
    files = {path.name: path for path in tiny_bundle.iterdir() if path.name != "pass_config.json"}
    assert set(manifest.files) == set(files)
    assert {"trunk.onnx", "trunk.onnx.data", "tail.noise.data", "tokenizer.json"} <= set(files)
    for name, info in manifest.files.items():
        content = files[name].read_bytes()
        assert (info.bytes, info.sha256) == (len(content), hashlib.sha256(content).hexdigest()), (
            name
        )


@pytest.mark.slow
@pytest.mark.parametrize("bundle", ["tiny_bundle", "half_bundle"])
def test_every_graph_is_as_described(request: pytest.FixtureRequest, bundle: str):
    directory: Path = request.getfixturevalue(bundle)
    manifest = read_manifest(directory)
    assert manifest.processors is not None
    both = (manifest.logprobs, manifest.processors)
    graphs = [
        manifest.trunk,
        *both,
        *(graph for plan in manifest.plans for graph in plan.tails.values()),
    ]
    graphs += [
        manifest.trunk.model_copy(update={"file": derived.file}) for derived in manifest.derived
    ]
    assert {graph.file for graph in graphs} == {path.name for path in directory.glob("*.onnx")}
    for graph in graphs:
        session = ort.InferenceSession(directory / graph.file, providers=["CPUExecutionProvider"])
        for described, found in (
            (graph.inputs, session.get_inputs()),
            (graph.outputs, session.get_outputs()),
        ):
            expected = [(tensor.name, tensor.dtype, list(tensor.shape)) for tensor in described]
            assert [(arg.name, ORT_TYPES[arg.type], arg.shape) for arg in found] == expected, (
                graph.file
            )


def test_plans_are_those_of_the_runtime(manifest: Manifest):
    expected = [(plan.name, plan.drafts, plan.groups, plan.next.name) for plan in bundle_plans(6)]
    assert [(plan.name, plan.drafts, plan.groups, plan.next) for plan in manifest.plans] == expected
    for plan, of in zip(manifest.plans, bundle_plans(6), strict=True):
        constants = plan.constants
        assert list(constants.row_position) == of.row_position.tolist()
        assert [
            [seen == "1" for seen in row] for row in constants.window_mask
        ] == of.window_mask.tolist()
        assert list(constants.logit_rows) == of.logit_rows.tolist()
        assert list(constants.lookahead_rows) == of.lookahead_rows.tolist()
        assert [list(row) for row in constants.draft_rows] == (
            of.draft_rows.tolist() if of.is_fused else []
        )
        assert list(constants.lookahead_ids) == of.lookahead_ids(VOCAB_SIZE).tolist()
        files = {sampler: graph.file for sampler, graph in plan.tails.items()}
        assert files == {s: f"tail.{plan.name}.{s}.onnx" for s in ("greedy", "sample", "truncated")}


def test_feeds_are_those_of_the_tensors_names(manifest: Manifest):
    graphs = [manifest.trunk, *(graph for plan in manifest.plans for graph in plan.tails.values())]
    outputs = {tensor.name for graph in graphs for tensor in graph.outputs}
    assert manifest.feeds == {name: fed for name in outputs if (fed := fed_input(name)) is not None}
    assert (manifest.feeds["next_ids"], manifest.feeds["next_length"]) == ("input_ids", "length")
    assert manifest.feeds["present_key.0"] == "past_key.0"


def test_model_info(manifest: Manifest, tiny_model: Path):
    model = manifest.model
    assert (model.name, model.source) == (tiny_model.name, f"directory:{tiny_model.name}")
    assert (model.family, model.dtype, model.vocab_size, model.hidden_size) == (
        "llama",
        "float32",
        VOCAB_SIZE,
        64,
    )
    assert (model.layers, model.heads, model.kv_heads, model.head_dim) == (2, 4, 2, 16)
    assert (model.max_capacity, model.bos_token_id, model.eos_token_ids) == (768, BOS, (EOS,))


def test_lookahead_info(manifest: Manifest, random_bundle: Path):
    assert (manifest.lookahead.length, manifest.lookahead.trained) == (6, False)
    assert manifest.lookahead.source.startswith("untrained: ")
    trained = read_manifest(random_bundle).lookahead
    assert (trained.length, trained.trained, trained.source) == (6, True, "file:random.safetensors")


def test_tools_are_the_installed_ones(manifest: Manifest):
    assert {"python", "torch", "transformers", "onnxruntime", "pass-toolkit"} <= set(manifest.tools)
    for name, version in manifest.tools.items():
        if name != "python":
            assert version == importlib.metadata.version(name)


def test_tokenizer_and_template(tiny_bundle: Path):
    session, original = load(tiny_bundle, "cpu", threads=1), make_tokenizer()
    for text in ("The quick brown fox", "Über 🦊\n\t x", "<bos>a<eos>", ""):
        assert session.tokenizer.encode(text).ids == original(text)["input_ids"]
    assert (tiny_bundle / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    expected = original.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert (
        session.encode_chat(messages) == original(expected, add_special_tokens=False)["input_ids"]
    )


def test_special_tokens_are_those_of_the_tokenizer(manifest: Manifest):
    assert (
        manifest.model.special_tokens
        == make_tokenizer().special_tokens_map
        == {"bos_token": "<bos>", "eos_token": "<eos>"}
    )


def test_named_templates(tmp_path: Path):
    """The bundle keeps those that a session chooses; a warning names the others."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "b", "rag": "c"}
    with pytest.warns(
        UserWarning, match="left out the chat templates rag: only default and tool_use are used"
    ):
        write_tokenizer(tmp_path, tokenizer)
    written = {path.name: path.read_text() for path in tmp_path.glob("*.jinja")}
    assert written == {"chat_template.jinja": "a", "chat_template.tool_use.jinja": "b"}


def test_a_broken_template_is_refused(tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "{% if %}"}
    with pytest.raises(PassError, match=r"^chat_template\.tool_use\.jinja: "):
        write_tokenizer(tmp_path, tokenizer)


@pytest.mark.slow
def test_exporting_again_gives_the_same_bytes(tiny_bundle: Path, tiny_model: Path, tmp_path: Path):
    again = export_bundle(tiny_model, tmp_path / "again", lookahead=6)
    names = {path.name for path in tiny_bundle.iterdir()}
    assert {path.name for path in again.iterdir()} == names
    differing = [
        name
        for name in sorted(names)
        if (again / name).read_bytes() != (tiny_bundle / name).read_bytes()
    ]
    assert differing == []


def test_half_precision(half_bundle: Path, tiny_bundle: Path):
    manifest = read_manifest(half_bundle)
    cache = {t.dtype for t in manifest.trunk.inputs if t.name.startswith("past_")}
    assert (manifest.model.dtype, cache) == ("float16", {"float16"})
    assert {t.name: t.dtype for t in manifest.trunk.outputs}[
        "logits"
    ] == "float32"  # what the tails read
    sizes = [(bundle / "trunk.onnx.data").stat().st_size for bundle in (half_bundle, tiny_bundle)]
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(1.0, seed=3), SamplingParams(0.8, 40, 0.9, 3)]
)
def test_half_precision_is_lossless_too(half_bundle: Path, sampling: SamplingParams):
    session = load(half_bundle, "cpu", threads=1)
    prompt = session.encode("The quick brown fox")
    ar = GenerateOptions(32, sampling, plan="ar", ignore_eos=True)
    plain = run_tokens(session, prompt, ar).token_ids
    for lookahead in (1, 2, 3):
        options = replace(ar, plan="two-pass", lookahead=lookahead)
        assert_same_text(session, prompt, options, plain)


def test_registry():
    entries = registry()
    assert "smollm2-135m" in entries  # the quick start's model
    for name, entry in entries.items():
        assert re.fullmatch(r"[a-z0-9.-]+", name)
        assert len({"hub", "pypi"} & entry.keys()) == 1, name
        assert entry.keys() <= {"about", "hub", "pypi"} and entry["about"]
        if "hub" in entry:
            assert entry["hub"].count("/") == 1
        else:
            wheels = WheelFile(**entry["pypi"])
            assert "==" in wheels.requirement and re.fullmatch("[0-9a-f]{64}", wheels.sha256)
            assert wheels.saved_as.endswith(".gguf")
            assert (
                (wheels.parts > 1) == ("{part}" in wheels.requirement) == ("{part}" in wheels.file)
            )


def test_the_limit_of_the_check_follows_from_the_model(tiny_bundle: Path):
    """It grows with width and depth, has a minimum, and is larger in fp16."""
    sizes = read_manifest(tiny_bundle).model
    assert limits_of(sizes).error == 1e-4
    large = sizes.model_copy(update={"layers": 32, "hidden_size": 4096})
    assert 5e-4 < limits_of(large).error < 1e-3
    assert limits_of(large.model_copy(update={"layers": 128})).error == pytest.approx(
        2 * limits_of(large).error
    )
    assert limits_of(large.model_copy(update={"dtype": "float16"})).error == 3e-2
