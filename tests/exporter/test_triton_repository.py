"""pass-export triton: a model that appears whole or not at all, in a repository that may have others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from pass_exporter import triton
from pass_exporter.cli import main


def run(*arguments: object) -> str:
    """What it prints; its one line on stderr where it fails."""
    done = CliRunner().invoke(main, ["triton", *map(str, arguments)])
    if done.exit_code == 0:
        return done.stdout.strip()
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    return done.stderr.strip()


def parameters(config: str) -> dict[str, str]:
    return dict(re.findall(r'parameters { key: "(\w+)" value { string_value: "(.*)" } }', config))


def test_a_model_refers_to_its_bundle(tiny_bundle: Path, tmp_path: Path):
    model = Path(run(tiny_bundle, "-o", tmp_path / "new" / "models", "--max-batch-size", 3, "--device", "cpu"))
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


def test_another_is_put_beside_it_with_its_bundle(tiny_bundle: Path, tmp_path: Path):
    run(tiny_bundle, "-o", tmp_path)
    more = ("--tokens", "--copy", "--instances", 2, "--device", "cuda", "--reuse-prefix")
    model = Path(run(tiny_bundle, "-o", tmp_path, *more))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-llama", "tiny-llama-tokens"]
    config = (model / "config.pbtxt").read_text()
    assert "count: 2 kind: KIND_GPU" in config
    assert parameters(config)["reuse_prefix"] == "true"
    copied = model / parameters(config)["bundle"]
    assert {path.name for path in copied.iterdir()} == {path.name for path in tiny_bundle.iterdir()}
    assert "text_input" not in config


def test_an_old_model_is_replaced_only_when_that_is_said(tiny_bundle: Path, tmp_path: Path):
    model = Path(run(tiny_bundle, "-o", tmp_path))
    (model / "note").write_text("mine")
    told = run(tiny_bundle, "-o", tmp_path)
    assert "--force" in told
    assert "--served-model-name" in told
    assert (model / "note").exists()
    run(tiny_bundle, "-o", tmp_path, "--force")
    assert sorted(path.name for path in model.iterdir()) == ["1", "config.pbtxt"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("precious")
    assert "is not a model" in run(tiny_bundle, "-o", tmp_path, "--force", "--served-model-name", "thesis")


def test_a_failure_leaves_nothing(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(triton, "config_pbtxt", full)
    assert "No space left on device" in run(tiny_bundle, "-o", tmp_path, "--copy")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--served-model-name", "a/b"], "cannot be a model's name"),
        (["--served-model-name", "../up"], "cannot be a model's name"),
        (["--served-model-name", ".hidden"], "cannot be a model's name"),
        (["--device", "tpu"], "unknown device"),
        (["--instances", "0"], "instances"),
        (["--max-batch-size", "0"], "max-batch-size"),
        (["--max-queue", "-1"], "max-queue"),
        (["--capacity", "7"], "capacity"),
        (["--request-seconds", "nan"], "request-seconds"),
        (["--drain-seconds", "-1"], "drain-seconds"),
        (["--capacity", 100_000], "more than the 768 tokens of the model"),
    ],
)
def test_what_cannot_be_is_refused(tiny_bundle: Path, tmp_path: Path, arguments: list[str], message: str):
    assert message in run(tiny_bundle, "-o", tmp_path / "models", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_wrong_places_are_refused(tiny_bundle: Path, tmp_path: Path):
    model = run(tiny_bundle, "-o", tmp_path / "models")
    assert "name the repository" in run(tiny_bundle, "-o", model)
    (tmp_path / "file").write_text("")
    assert "not a directory" in run(tiny_bundle, "-o", tmp_path / "file")
    assert "not a bundle" in run(tmp_path, "-o", tmp_path / "models")
    assert "-o" in run(tiny_bundle)
