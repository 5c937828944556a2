"""Ctrl-C and SIGTERM: what was written stays, the status is 130, and there is no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
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
def test_an_interrupted_generation_keeps_the_text_so_far(tiny_bundle: Path, number: signal.Signals):
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
def test_the_json_of_an_interrupted_generation_has_the_text_so_far(
    tiny_bundle: Path, tmp_path: Path, number: signal.Signals
):
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
def test_chat_stops_the_answer_and_goes_on(tiny_bundle: Path):
    with answering_chat(tiny_bundle) as running:
        running.send_signal(signal.SIGINT)
        running.stdin.write(b"/quit\n")
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0
    assert errors.decode() == " [stopped]"


@pytest.mark.slow
def test_sigterm_ends_a_chat(tiny_bundle: Path):
    with answering_chat(tiny_bundle) as running:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(timeout=60)  # standard input stays open, so only the signal ends the chat
        except subprocess.TimeoutExpired:
            running.kill()
    assert running.returncode == 130


@pytest.mark.slow
def test_chat_stops_a_command_and_goes_on(tiny_bundle: Path, tmp_path: Path):
    """/load of a pipe that nobody writes to would never end."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    flags = ("--ignore-eos", "--max-new-tokens", "6", "--plan", "ar")
    with start("chat", tiny_bundle, *flags) as running:
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write(f"hello\n/load {fifo}\n".encode())
        running.stdin.flush()
        while not running.stdout.readline():
            pass
        writer = os.open(fifo, os.O_WRONLY)  # waits until the chat has opened the pipe to read it
        running.send_signal(signal.SIGINT)
        running.stdin.write(b"hello\n")
        rest, errors = running.communicate(timeout=60)
        os.close(writer)
    assert (running.returncode, errors.decode()) == (0, "[stopped]\n")
    assert rest.strip()
