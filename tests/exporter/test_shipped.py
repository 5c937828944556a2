"""The look-ahead weights that the package ships, which an export finds by itself; and the report of
an export."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import change_tensors, changed_copy
from export_process import command

from conftest import SilentProgress, make_model
from pass_exporter.config import ExportConfig
from pass_exporter.export import export
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import FILE_NAME, shipped_weights
from pass_exporter.model.registry import resolve
from pass_runtime import read_manifest

NAME = "smollm2-135m"
"""The name of a model with shipped weights."""
fine_tune = change_tensors(lambda old: {name: tensor * 1.02 for name, tensor in old.items()})
"""Changes all weights a little, as fine-tuning does."""


def report_of(model: Path, *flags: object) -> str:
    done = command("--lookahead", 2, "--model", model, *flags)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stderr.split())


@pytest.fixture
def shipped(adapter_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "models"
    (models / NAME).mkdir(parents=True)
    shutil.copy(adapter_weights, models / NAME / FILE_NAME)
    monkeypatch.setattr("pass_exporter.model.lookahead.models_directory", lambda: models)


@pytest.mark.slow
@pytest.mark.usefixtures("shipped")
def test_shipped_weights_are_found_by_the_weights_of_the_model_and_not_by_its_name(
    tiny_model: Path, tmp_path: Path
):
    report = report_of(tiny_model, "-o", tmp_path / "bundle")
    assert "look-ahead embeddings file:lookahead" in report
    assert read_manifest(tmp_path / "bundle").lookahead.trained
    assert shipped_weights(load_model(resolve(str(tiny_model)), "bf16").model) is not None
    model = changed_copy(tiny_model, tmp_path / NAME, fine_tune)
    assert shipped_weights(load_model(resolve(str(model)), "fp32").model) is None


@pytest.mark.slow
def test_a_fine_tuned_model_with_a_shipped_name_gets_untrained_embeddings(
    tiny_model: Path, tmp_path: Path
):
    model = changed_copy(tiny_model, tmp_path / NAME, fine_tune)
    assert (
        "untrained: mean of the vocabulary embeddings no trained embeddings are shipped for "
        "this model: pass-train" in report_of(model, "-o", tmp_path / "bundle")
    )
    assert not read_manifest(tmp_path / "bundle").lookahead.trained


@pytest.mark.slow
def test_the_report_of_a_bf16_export_says_that_it_needs_engines(tiny_model: Path, tmp_path: Path):
    bundle = tmp_path / "bundle"
    assert (
        f"ONNX Runtime cannot run bf16: build engines next (pass-export build {bundle} --engine"
        in report_of(tiny_model, "--dtype", "bf16", "-o", bundle)
    )
    assert list(bundle.glob("trunk.check*")) == []  # the graph that was checked in their place


@pytest.mark.slow
def test_the_report_counts_the_tokens_that_were_compared(tmp_path: Path):
    model = make_model(tmp_path / "short", max_position_embeddings=16)
    config = ExportConfig(str(model), lookahead=2, output=tmp_path / "bundle")
    report = export(config, SilentProgress())
    assert report.decoding.greedy_tokens == 8
