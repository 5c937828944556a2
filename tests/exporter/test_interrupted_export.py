"""An export that a full disk or a signal ends leaves no files."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from export_process import PASS_EXPORT, error_line, process, wait_for


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that has room for the tiny trunk, but not for the tails, which follow it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_an_export_to_a_full_disk_is_reported_and_leaves_no_files(
    tiny_model: Path, small_disk: Path
):
    flags = ("--model", tiny_model, "--lookahead", 1, "-o", small_disk / "bundle")
    error = error_line(process(*flags))
    assert "No space left" in error and "bundle" in error
    assert list(small_disk.iterdir()) == []


@pytest.mark.slow
def test_a_failed_write_of_weights_is_reported(tiny_model: Path, tmp_path: Path):
    """The limit of 100 kB per file is too small for trunk.onnx.data."""
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
        output, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert output == ""
    assert errors.splitlines()[-1] == "interrupted" and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
