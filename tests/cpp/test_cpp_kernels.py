"""The C++ runtime describes this CPU's kernels as `pass-run inspect` does; tests/cpus: other
CPUs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from cpp_programs import program_at

from pass_runtime.bundle.manifest import FILE_NAME, QuantizationInfo, SchemeInfo
from pass_runtime.bundle.read import read_manifest
from pass_runtime.cli.main import main

WEIGHTS = {
    "full": None,
    "w8a8": SchemeInfo(numbers="int8", block_size=None, zero_points=False),
    "int8": SchemeInfo(numbers="int8", block_size=32, zero_points=False),
    "int4": SchemeInfo(numbers="int4", block_size=32, zero_points=True),
}


def test_kernels_are_described_as_in_python(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest, bundles = read_manifest(tiny_bundle), []
    for weights, scheme in WEIGHTS.items():
        info = None if scheme is None else QuantizationInfo(grid=scheme, lm_head=None)
        model = manifest.model.model_copy(update={"weights": weights, "quantization": info})
        bundles.append(tmp_path / weights)
        bundles[-1].mkdir()
        text = manifest.model_copy(update={"model": model}).model_dump_json()
        (bundles[-1] / FILE_NAME).write_text(text, encoding="utf-8")
    monkeypatch.setenv("COLUMNS", "300")  # so that no row of the table is broken
    done = subprocess.run(
        [program_at("kernels"), *bundles], capture_output=True, text=True, check=True, timeout=60
    )
    for bundle, description in zip(bundles, done.stdout.splitlines(), strict=True):
        shown = CliRunner().invoke(main, ["inspect", str(bundle)]).stdout
        [row] = [line for line in shown.splitlines() if "this CPU" in line]
        assert description in row
