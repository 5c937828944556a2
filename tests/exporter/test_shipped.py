"""The look-ahead weights that an export chooses by itself, and its report."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest
from checkpoints import broken, tensors

import pass_exporter.cli
from conftest import SilentProgress, make_model
from pass_exporter.config import ExportConfig
from pass_exporter.export import export
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import FILE_NAME
from pass_exporter.model.registry import resolve
from pass_exporter.model.shipped import shipped_weights
from pass_runtime import read_manifest

NAME = "smollm2-135m"
"""The name of a model with shipped weights."""
fine_tuned = tensors(lambda found: {name: tensor * 1.02 for name, tensor in found.items()})


@pytest.fixture
def said() -> Callable[..., str]:
    """Return a function: flags of an export -> the text of its report."""

    def run(*flags: object) -> str:
        done = click.testing.CliRunner().invoke(
            pass_exporter.cli.main, ["--lookahead", "2", *map(str, flags)]
        )
        assert done.exit_code == 0, done.stderr
        return " ".join(done.stderr.split())

    return run


@pytest.fixture
def shipped(adapter_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ship weights for the tiny model."""
    models = tmp_path / "models"
    (models / NAME).mkdir(parents=True)
    shutil.copy(adapter_weights, models / NAME / FILE_NAME)
    monkeypatch.setattr("pass_exporter.model.shipped.models_directory", lambda: models)


@pytest.mark.slow
@pytest.mark.usefixtures("shipped")
def test_shipped_weights_are_found_by_the_weights_of_the_model(
    said: Callable[..., str], tiny_model: Path, tmp_path: Path
):
    assert "look-ahead embeddings file:lookahead" in said(
        "--model", tiny_model, "-o", tmp_path / "bundle"
    )
    assert read_manifest(tmp_path / "bundle").lookahead.trained
    assert shipped_weights(load_model(resolve(str(tiny_model)), "bf16").model) is not None
    model = broken(tiny_model, tmp_path / NAME, fine_tuned)
    assert shipped_weights(load_model(resolve(str(model)), "fp32").model) is None


@pytest.mark.slow
def test_a_fine_tuned_model_with_a_shipped_name_gets_untrained_embeddings(
    said: Callable[..., str], tiny_model: Path, tmp_path: Path
):
    text = said(
        "--model", broken(tiny_model, tmp_path / NAME, fine_tuned), "-o", tmp_path / "bundle"
    )
    assert (
        "untrained: mean of the vocabulary embeddings no trained embeddings are shipped for "
        "this model: pass-train" in text
    )
    assert not read_manifest(tmp_path / "bundle").lookahead.trained


@pytest.mark.slow
def test_the_report_of_a_bf16_export_says_that_it_needs_engines(
    said: Callable[..., str], tiny_model: Path, tmp_path: Path
):
    text = said("--model", tiny_model, "--dtype", "bf16", "-o", tmp_path / "bf16")
    assert (
        "ONNX Runtime cannot run bf16: build engines next (pass-export build "
        f"{tmp_path / 'bf16'} --engine" in text
    )
    assert list((tmp_path / "bf16").glob("trunk.check*")) == []


@pytest.mark.slow
def test_the_report_counts_the_tokens_that_were_compared(tmp_path: Path):
    """A model for 16 tokens has no room for the usual 32 after a prompt."""
    model = make_model(tmp_path / "short", max_position_embeddings=16)
    report = export(
        ExportConfig(str(model), lookahead=2, output=tmp_path / "bundle"), SilentProgress()
    )
    assert report.greedy_tokens == 8
