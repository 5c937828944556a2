"""Ctrl-C and SIGTERM: what was written stays, the status is 130, and nobody sees a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from changed_pass_run import held_pass_run, pass_run_after
from pass_run import SLOW_PASS_RUN, output


def started(*arguments: object, command: list[str] = SLOW_PASS_RUN) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *map(str, arguments)], stdin=pipe, stdout=pipe, stderr=pipe)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_long_generation(tiny_bundle: Path, number: signal.Signals):
    flags = (
        "generate",
        tiny_bundle,
        "-p",
        "The quick brown fox",
        "--ignore-eos",
        "--max-new-tokens",
        "300",
    )
    with started(*flags) as running:
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_long_generation_as_json(tiny_bundle: Path, tmp_path: Path, number: signal.Signals):
    """What was written by then is printed."""
    passes = tmp_path / "passes"
    slow = pass_run_after(f"Path({str(passes)!r}).open('a').write('.')", "time.sleep(0.05)")
    flags = (
        "generate",
        tiny_bundle,
        "-p",
        "The quick brown fox",
        "--ignore-eos",
        "--max-new-tokens",
        "300",
    )
    with started(*flags, "--plan", "ar", "--json", command=slow) as running:
        while not passes.is_file() or passes.stat().st_size < 8:
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(number)
        printed, errors = running.communicate(timeout=60)
    assert (running.returncode, errors.decode()) == (130, "interrupted\n")
    found, whole = json.loads(printed), json.loads(output(*flags, "--json"))
    assert found["finish_reason"] == "cancelled" and 1 < len(found["token_ids"]) < 300
    assert whole["token_ids"][: len(found["token_ids"])] == found["token_ids"] and found["text"]


def test_chat_stops_the_answer_and_goes_on(tiny_bundle: Path):
    with started("chat", tiny_bundle, "--ignore-eos", "--max-new-tokens", "300") as running:
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write(b"hello\n")
        running.stdin.flush()
        assert running.stdout.read(4)
        running.send_signal(signal.SIGINT)
        running.stdin.write(b"/quit\n")
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0
    assert errors.decode() == " [stopped]"


def test_sigterm_ends_a_chat(tiny_bundle: Path):
    """Not only its answer: whoever sends SIGTERM wants the process to end."""
    with started("chat", tiny_bundle, "--ignore-eos", "--max-new-tokens", "300") as running:
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write(b"hello\n")
        running.stdin.flush()
        assert running.stdout.read(4)
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(timeout=60)  # standard input stays open: it would wait for the next line
        except subprocess.TimeoutExpired:
            running.kill()
    assert running.returncode == 130


def test_batch_keeps_what_is_done(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps({"prompt": f"number {i}"}) + "\n" for i in range(20)))
    flags = ("--max-new-tokens", "5", "--ignore-eos", "--max-batch-size", "1")
    held = held_pass_run(tmp_path, results.name, 2)
    with started("batch", tiny_bundle, requests, results, *flags, command=held) as running:
        while not results.is_file() or results.read_bytes().count(b"\n") < 2:
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert errors.decode() == "interrupted\n"
    lines = results.read_text().splitlines()
    assert 2 <= len(lines) < 20
    assert [json.loads(line)["line"] for line in lines] == list(range(1, len(lines) + 1))


def test_chat_stops_a_command_and_goes_on(tiny_bundle: Path, tmp_path: Path):
    """A pipe that nobody writes to would be read for ever."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with started(
        "chat", tiny_bundle, "--ignore-eos", "--max-new-tokens", "6", "--plan", "ar"
    ) as running:
        assert running.stdin is not None and running.stdout is not None
        running.stdin.write(f"hello\n/load {fifo}\n".encode())
        running.stdin.flush()
        while not running.stdout.readline():
            pass
        writer = os.open(fifo, os.O_WRONLY)  # once the chat has opened it to read
        running.send_signal(signal.SIGINT)
        running.stdin.write(b"hello\n")
        rest, errors = running.communicate(timeout=60)
        os.close(writer)
    assert (running.returncode, errors.decode()) == (0, "[stopped]\n")
    assert rest.strip()
