"""pass-export triton writes whole models into a repository, and refuses what cannot be served."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from conftest import export_bundle
from pass_exporter import triton
from pass_exporter.cli import main
from pass_runtime import PassError, load, read_manifest
from pass_runtime.bundle.manifest import FILE_NAME, EngineSet


def run(*arguments: object) -> str:
    done = CliRunner().invoke(main, ["triton", *map(str, arguments)])
    if done.exit_code == 0:
        return done.stdout.strip()
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    return done.stderr.strip()


def parameters(config: str) -> dict[str, str]:
    return dict(re.findall(r'parameters { key: "(\w+)" value { string_value: "(.*)" } }', config))


def test_a_model_of_texts_refers_to_its_bundle(tiny_bundle: Path, tmp_path: Path):
    flags = ("--max-batch-size", 3, "--device", "cpu")
    model = Path(run(tiny_bundle, "-o", tmp_path / "new" / "models", *flags))
    assert model == tmp_path / "new" / "models" / "tiny-llama"
    config = (model / "config.pbtxt").read_text()
    assert parameters(config) == {
        "bundle": str(tiny_bundle.resolve()),
        "tokens": "false",
        "device": "cpu",
        "max_batch_size": "3",
    }
    assert "decoupled: true" in config
    assert "instance_group { count: 1 kind: KIND_CPU }" in config
    assert '"text_input" data_type: TYPE_STRING dims: [ 1 ] }' in config
    assert '"max_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true }' in config
    assert "output_ids" not in config


def test_a_second_model_of_tokens_has_a_copy_of_its_bundle(tiny_bundle: Path, tmp_path: Path):
    run(tiny_bundle, "-o", tmp_path)
    flags = "--tokens --copy --instances 2 --device cuda --reuse-prefix --no-prefix-cache"
    flags = f"{flags} --speculative-max-concurrency 0"
    model = Path(run(tiny_bundle, "-o", tmp_path, *flags.split()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-llama", "tiny-llama-tokens"]
    config = (model / "config.pbtxt").read_text()
    assert "count: 2 kind: KIND_GPU" in config
    assert parameters(config)["reuse_prefix"] == "true"
    assert parameters(config)["prefix_cache"] == "false"
    assert parameters(config)["speculative_max_concurrency"] == "0"
    copy = model / parameters(config)["bundle"]
    assert {path.name for path in copy.iterdir()} == {path.name for path in tiny_bundle.iterdir()}
    assert "text_input" not in config


def test_a_model_is_replaced_with_force_only(tiny_bundle: Path, tmp_path: Path):
    model = Path(run(tiny_bundle, "-o", tmp_path))
    (model / "note").write_text("mine")
    error = run(tiny_bundle, "-o", tmp_path)
    assert "--force" in error and "--served-model-name" in error
    assert (model / "note").exists()
    run(tiny_bundle, "-o", tmp_path, "--force")
    assert sorted(path.name for path in model.iterdir()) == ["1", "config.pbtxt"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("precious")
    assert "is not a model" in run(
        tiny_bundle, "-o", tmp_path, "--force", "--served-model-name", "thesis"
    )


def test_a_failure_leaves_no_files(tiny_bundle, tmp_path, monkeypatch):
    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(triton, "config_pbtxt", fail)
    assert "No space left on device" in run(tiny_bundle, "-o", tmp_path, "--copy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--served-model-name", "a/b"], "cannot be a model's name"),
        (["--served-model-name", "../up"], "cannot be a model's name"),
        (["--served-model-name", ".hidden"], "cannot be a model's name"),
        (["--device", "tpu"], "unknown device"),
        (["--device", "tensorrt"], "run: pass-export build {bundle} --engine tensorrt"),
        (["--instances", "0"], "instances"),
        (["--max-batch-size", "0"], "max-batch-size"),
        (["--max-queue", "-1"], "max-queue"),
        (["--capacity", "7"], "capacity"),
        (["--request-seconds", "nan"], "request-seconds"),
        (["--drain-seconds", "-1"], "drain-seconds"),
        (["--capacity", 100_000], "more than the 768 tokens of the model"),
    ],
)
def test_wrong_options_are_refused(tiny_bundle, tmp_path, arguments, message):
    error = run(tiny_bundle, "-o", tmp_path / "models", *arguments)
    assert message.format(bundle=tiny_bundle) in error
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def bf16_bundle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_bundle(
        tiny_model, tmp_path_factory.mktemp("bundles") / "bf16", lookahead=1, dtype="bf16"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda", "auto"])
def test_bf16_without_engines_is_refused(bf16_bundle: Path, tmp_path: Path, device: str):
    error = run(bf16_bundle, "-o", tmp_path / "models", "--device", device)
    assert (
        f"run pass-export build {bf16_bundle} --engine tensorrt; for ONNX Runtime export with "
        "--dtype fp16" in error
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PassError) as refused:
        load(bf16_bundle, device)
    assert str(refused.value) in error


@pytest.mark.parametrize("current", [True, False])
def test_engines_that_were_built_from_other_graphs_are_refused(bf16_bundle, tmp_path, current):
    shutil.copytree(bf16_bundle, tmp_path / "bundle")
    manifest = read_manifest(bf16_bundle)
    sizes = {"lookahead": 1, "max_batch_size": 1, "capacities": (64,)}
    graphs = manifest.content_hash if current else "0" * 64
    built = {"library": "tensorrt", "version": "10.16", "targets": ("sm90",), "bundle": graphs}
    engines = EngineSet(directory="x", prefill_widths=(), engines=(), **built, **sizes)
    changed = manifest.model_copy(update={"engines": (engines,)})
    (tmp_path / "bundle" / FILE_NAME).write_text(changed.text())
    for device in ("tensorrt", "auto"):
        flags = ("-o", tmp_path / "models", "--served-model-name", device, "--device", device)
        printed = run(tmp_path / "bundle", *flags)
        if current:
            assert printed == str(tmp_path / "models" / device)
        else:
            assert f"pass-export build {tmp_path / 'bundle'} --engine tensorrt" in printed
        if not current and device == "tensorrt":
            assert "were built from other graphs than the bundle has now" in printed


def test_wrong_paths_are_refused(tiny_bundle: Path, tmp_path: Path):
    model = run(tiny_bundle, "-o", tmp_path / "models")
    assert "name the repository" in run(tiny_bundle, "-o", model)
    (tmp_path / "file").write_text("")
    assert "not a directory" in run(tiny_bundle, "-o", tmp_path / "file")
    assert "not a bundle" in run(tmp_path, "-o", tmp_path / "models")
    assert "-o" in run(tiny_bundle)
