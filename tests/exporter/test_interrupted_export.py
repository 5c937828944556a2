"""An export that a full disk or a signal ends leaves no files."""

from __future__ import annotations

import resource
import signal
import subprocess
from pathlib import Path

import pytest
from export_process import PASS_EXPORT, error_line, process, wait_for


@pytest.mark.slow
def test_a_failed_write_of_weights_is_reported(tiny_model: Path, tmp_path: Path):
    limit = (100_000, 100_000)
    done = process(
        *("--model", tiny_model, "--lookahead", 1, "-o", tmp_path / "bundle"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    error = error_line(done)
    assert "File too large" in error or "disk" in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "awaited_path"),
    [(signal.SIGTERM, ".bundle.partial"), (signal.SIGINT, ".bundle.partial/trunk.onnx.data")],
    ids=["SIGTERM while loading", "SIGINT while writing"],
)
def test_an_export_that_a_signal_ends_leaves_no_files(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, awaited_path: str
):
    flags = ["--model", str(tiny_model), "--lookahead", "6", "-o", str(tmp_path / "bundle")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*PASS_EXPORT, *flags], **pipes) as running:
        wait_for(tmp_path, awaited_path, running)
        running.send_signal(number)
        output, errors = running.communicate()
    assert running.returncode == 130
    assert output == ""
    assert errors.splitlines()[-1] == "interrupted" and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
