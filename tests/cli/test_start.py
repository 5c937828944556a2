"""Ctrl-C while a command starts shows no traceback, whatever is being imported."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HANDLED = "handled"
"""The moment at which a command has its handler for SIGTERM."""
LIBRARIES = {
    "pass_runtime": ("_multiarray_umath", "_pydantic_core", "onnxruntime_pybind11_state"),
    "pass_exporter": ("_pydantic_core", "libtorch_python"),
    "pass_trainer": ("libtorch_python",),
}
"""By package: shared libraries whose loading is another moment, in the middle of imports."""
MOMENTS = [
    (package, moment)
    for package, libraries in LIBRARIES.items()
    for moment in (HANDLED, *libraries)
]


@pytest.fixture
def arguments(tiny_bundle: Path, tiny_model: Path, tmp_path: Path) -> dict[str, list[str]]:
    flags = ("--max-new-tokens", "700", "--ignore-eos", "--plan", "ar")
    generate = ["generate", str(tiny_bundle), "-p", "fox", *flags]
    output = ["--model", str(tiny_model), "-o", str(tmp_path / "out")]
    return {"pass_runtime": generate, "pass_exporter": output, "pass_trainer": output}


def reached(running: subprocess.Popen[str], moment: str) -> bool:
    """Whether the process handles SIGTERM, or has mapped the library named `moment`."""
    process = Path(f"/proc/{running.pid}")
    if moment == HANDLED:
        (caught,) = re.findall(r"SigCgt:\s*(\w+)", (process / "status").read_text())
        return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
    return moment in (process / "maps").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("package", "moment"), MOMENTS, ids=lambda value: value)
def test_an_interrupt_at_the_start_ends_quietly(
    package: str, moment: str, arguments: dict[str, list[str]]
):
    command = [sys.executable, "-m", package, *arguments[package]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        while running.poll() is None and not reached(running, moment):
            time.sleep(0.001)
        still_running = running.poll() is None
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=120)
    assert "Traceback" not in errors and "Exception ignored" not in errors, errors
    if still_running:  # on a busy machine it may finish before the signal arrives
        assert running.returncode in (0, 130)
        assert errors.count("interrupted") == (running.returncode == 130)


def test_commands_handle_signals_before_they_import_libraries():
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert sorted(scripts.values()) == [f"{package}.__main__:main" for package in sorted(LIBRARIES)]
    for package in LIBRARIES:
        code = f"import {package}.__main__, sys; print(*sys.modules)"
        modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
        assert not {"numpy", "pydantic", "click", "onnxruntime", "torch"} & set(modules)
