"""What an export writes: the manifest, which must agree with the files of the bundle, and the
tokenizer. And its report."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
from export_process import command

from conftest import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    VOCAB_SIZE,
    SilentProgress,
    export_bundle,
    make_model,
    make_tokenizer,
)
from pass_exporter.bundle import write_tokenizer
from pass_exporter.checks.trunks import limits_of
from pass_exporter.config import ExportConfig
from pass_exporter.export import export
from pass_runtime import Manifest, PassError, load, read_manifest
from pass_runtime.backends.ort.session import open_session

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
def test_every_graph_has_the_inputs_and_outputs_of_the_manifest(request, bundle):
    directory: Path = request.getfixturevalue(bundle)
    manifest = read_manifest(directory)
    graphs = [manifest.trunk, manifest.logprobs, manifest.processors]
    graphs += [graph for window in manifest.windows for graph in window.tails.values()]
    graphs += [
        manifest.trunk.model_copy(update={"file": derived.file}) for derived in manifest.derived
    ]
    assert {graph.file for graph in graphs} == {path.name for path in directory.glob("*.onnx")}
    for graph in graphs:
        session = open_session(directory / graph.file, "cpu")
        for described, actual in (
            (graph.inputs, session.get_inputs()),
            (graph.outputs, session.get_outputs()),
        ):
            expected = [(tensor.name, tensor.dtype, list(tensor.shape)) for tensor in described]
            tensors = [(tensor.name, ORT_TYPES[tensor.type], tensor.shape) for tensor in actual]
            assert tensors == expected, graph.file


def test_the_manifest_describes_the_model(manifest: Manifest, tiny_model: Path):
    model = manifest.model
    assert (model.name, model.source) == (tiny_model.name, f"directory:{tiny_model.name}")
    assert (model.family, model.dtype) == ("llama", "float32")
    assert (model.vocab_size, model.hidden_size) == (VOCAB_SIZE, 64)
    assert (model.layers, model.heads, model.kv_heads, model.head_dim) == (2, 4, 2, 16)
    assert (model.max_capacity, model.bos_token_id, model.eos_token_ids) == (768, BOS, (EOS,))
    assert model.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}


def test_the_manifest_says_where_the_look_ahead_embeddings_are_from(manifest, random_bundle):
    assert (manifest.lookahead.length, manifest.lookahead.trained) == (6, False)
    assert manifest.lookahead.source.startswith("untrained: ")
    trained = read_manifest(random_bundle).lookahead
    assert (trained.length, trained.trained, trained.source) == (6, True, "file:random.safetensors")


def test_the_manifest_has_the_installed_versions_of_tools(manifest: Manifest):
    assert {"python", "torch", "transformers", "onnxruntime", "pass-toolkit"} <= set(manifest.tools)
    for name, version in manifest.tools.items():
        if name != "python":
            assert version == importlib.metadata.version(name)


def test_a_session_encodes_texts_and_messages_as_transformers_does(tiny_bundle: Path):
    session, original = load(tiny_bundle, "cpu", threads=1), make_tokenizer()
    for text in ("The quick brown fox", "Über 🦊\n\t x", "<bos>a<eos>", ""):
        assert session.tokenizer.encode(text).ids == original(text)["input_ids"]
    assert (tiny_bundle / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    expected = original.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert (
        session.encode_chat(messages) == original(expected, add_special_tokens=False)["input_ids"]
    )


def test_a_bundle_has_the_chat_templates_that_a_session_uses(tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "b", "rag": "c"}
    with pytest.warns(
        UserWarning, match="left out the chat templates rag: only default and tool_use are used"
    ):
        write_tokenizer(tmp_path, tokenizer)
    written = {path.name: path.read_text() for path in tmp_path.glob("*.jinja")}
    assert written == {"chat_template.jinja": "a", "chat_template.tool_use.jinja": "b"}


def test_a_chat_template_that_is_no_valid_jinja_is_refused(tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "a", "tool_use": "{% if %}"}
    with pytest.raises(PassError, match=r"^chat_template\.tool_use\.jinja: "):
        write_tokenizer(tmp_path, tokenizer)


@pytest.mark.slow
def test_exporting_again_gives_the_same_bytes(tiny_bundle: Path, tiny_model: Path, tmp_path: Path):
    second = export_bundle(tiny_model, tmp_path / "second", lookahead=6)
    names = {path.name for path in tiny_bundle.iterdir()}
    assert {path.name for path in second.iterdir()} == names
    for name in sorted(names):
        assert (second / name).read_bytes() == (tiny_bundle / name).read_bytes(), name


def test_an_fp16_bundle_has_a_cache_in_fp16_and_logits_in_fp32(half_bundle, tiny_bundle):
    manifest = read_manifest(half_bundle)
    cache = {t.dtype for t in manifest.trunk.inputs if t.name.startswith("past_")}
    assert (manifest.model.dtype, cache) == ("float16", {"float16"})
    (logits,) = (tensor for tensor in manifest.trunk.outputs if tensor.name == "logits")
    assert logits.dtype == "float32"  # tails read float32
    half, full = (
        (bundle / "trunk.onnx.data").stat().st_size for bundle in (half_bundle, tiny_bundle)
    )
    assert half < 0.6 * full


@pytest.mark.slow
def test_the_report_of_a_bf16_export_says_that_it_needs_engines(tiny_model: Path, tmp_path: Path):
    bundle = tmp_path / "bundle"
    done = command("--lookahead", 2, "--model", tiny_model, "--dtype", "bf16", "-o", bundle)
    assert done.returncode == 0, done.stderr
    expected = f"ONNX Runtime cannot run bf16: build engines next (pass-export build {bundle} --eng"
    assert expected in " ".join(done.stderr.split())
    assert list(bundle.glob("trunk.check*")) == []  # the graph that was checked in their place


@pytest.mark.slow
def test_the_report_counts_the_tokens_that_were_compared(tmp_path: Path):
    model = make_model(tmp_path / "short", max_position_embeddings=16)
    config = ExportConfig(str(model), lookahead=2, output=tmp_path / "bundle")
    assert export(config, SilentProgress()).decoding.greedy_tokens == 8


def test_the_largest_error_that_an_export_accepts_depends_on_the_model(tiny_bundle: Path):
    sizes = read_manifest(tiny_bundle).model
    assert limits_of(sizes).error == 1e-4
    large = sizes.model_copy(update={"layers": 32, "hidden_size": 4096})
    assert 5e-4 < limits_of(large).error < 1e-3
    deeper = large.model_copy(update={"layers": 4 * 32})  # the error grows with the square root
    assert limits_of(deeper).error == pytest.approx(2 * limits_of(large).error)
    assert limits_of(large.model_copy(update={"dtype": "float16"})).error == 3e-2
