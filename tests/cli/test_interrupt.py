"""Ctrl-C and SIGTERM: what was written stays, the status is 130, and there is no traceback, also
while a command imports libraries."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from changed_pass_run import pass_run_with_hook
from pass_run import SLOW_PASS_RUN, output

LONG = ("--ignore-eos", "--max-new-tokens", "300")
SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name
)


def start(*arguments: object, command: list[str] = SLOW_PASS_RUN) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *map(str, arguments)], stdin=pipe, stdout=pipe, stderr=pipe)


@pytest.mark.slow
@SIGNALS
def test_an_interrupted_generation_keeps_the_text_so_far(tiny_bundle, number):
    flags = ("generate", tiny_bundle, "-p", "The quick brown fox", *LONG)
    with start(*flags) as running:
        assert running.stdout is not None
        first = running.stdout.read(8)
        running.send_signal(number)
        rest, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert errors.decode() == "interrupted\n"
    whole = output(*flags).encode()
    text = first + rest
    assert len(text) < len(whole) - 100
    assert whole.startswith(text)


@pytest.mark.slow
@SIGNALS
def test_the_json_of_an_interrupted_generation_has_the_text_so_far(tiny_bundle, tmp_path, number):
    passes = tmp_path / "passes"  # gets a byte before each pass
    slow = pass_run_with_hook(f"Path({str(passes)!r}).open('a').write('.')", "time.sleep(0.05)")
    flags = ("generate", tiny_bundle, "-p", "The quick brown fox", *LONG)
    with start(*flags, "--plan", "ar", "--json", command=slow) as running:
        while not passes.is_file() or passes.stat().st_size < 8:
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(number)
        printed, errors = running.communicate(timeout=60)
    assert (running.returncode, errors.decode()) == (130, "interrupted\n")
    cut, whole = json.loads(printed), json.loads(output(*flags, "--json"))
    assert cut["finish_reason"] == "cancelled" and 1 < len(cut["token_ids"]) < 300
    assert whole["token_ids"][: len(cut["token_ids"])] == cut["token_ids"] and cut["text"]


@contextmanager
def answering_chat(bundle: Path) -> Iterator[subprocess.Popen[bytes]]:
    with start("chat", bundle, *LONG) as running:
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write(b"hello\n")
        running.stdin.flush()
        assert running.stdout.read(4)
        yield running


@pytest.mark.slow
def test_chat_stops_the_answer_and_goes_on(tiny_bundle):
    with answering_chat(tiny_bundle) as running:
        running.send_signal(signal.SIGINT)
        running.stdin.write(b"/quit\n")
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0
    assert errors.decode() == " [stopped]"


@pytest.mark.slow
def test_sigterm_ends_a_chat(tiny_bundle):
    with answering_chat(tiny_bundle) as running:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(timeout=60)  # standard input stays open, so only the signal ends the chat
        except subprocess.TimeoutExpired:
            running.kill()
    assert running.returncode == 130


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
def arguments(tiny_bundle, tiny_model, tmp_path) -> dict[str, list[str]]:
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
def test_an_interrupt_at_the_start_ends_quietly(package, moment, arguments):
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
