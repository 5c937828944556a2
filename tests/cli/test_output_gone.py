"""Commands whose output cannot be written end without a traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from pass_run import PASS_RUN, assert_refused, write_jsonl

LONG = ("--max-new-tokens", "300", "--ignore-eos", "--plan", "ar")
COMMANDS = {
    "generate": ("generate", "BUNDLE", "-p", "fox", *LONG),
    "json": ("generate", "BUNDLE", "-p", "fox", *LONG, "--json"),
    "chat": ("chat", "BUNDLE", *LONG),
    "batch": ("batch", "BUNDLE", "REQUESTS", "-", *LONG),
    "bench": ("bench", "BUNDLE", "--repeat", "1", "--max-new-tokens", "4", "--plan", "ar"),
    "rows": ("bench", "BUNDLE", "--rows", "1", "--repeat", "1"),
    "inspect": ("inspect", "BUNDLE"),
    "help": ("generate", "--help"),
}


@pytest.fixture
def command(request, tiny_bundle, tmp_path) -> list[str]:
    requests = write_jsonl(tmp_path / "in.jsonl", *({"prompt": f"{n}"} for n in range(4)))
    names = {"BUNDLE": str(tiny_bundle), "REQUESTS": str(requests)}
    return [*PASS_RUN, *(names.get(part, part) for part in COMMANDS[request.param])]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, indirect=True)
def test_a_pipe_without_a_reader_ends_the_command_quietly(command):
    """As in `pass-run ... | head -c 1`, but without a race."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            command, input=b"hello\n", stdout=pipe, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 141, done.stderr  # what the shell reports for SIGPIPE
    assert done.stderr == b""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "chat", "batch", "inspect"], indirect=True)
@pytest.mark.parametrize("closed", [1, 2], ids=["stdout", "stderr"])
def test_a_closed_output_causes_no_traceback(command, closed):
    pipe = subprocess.PIPE
    line = ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command]
    done = subprocess.run(line, input=b"hello\n", stdout=pipe, stderr=pipe, timeout=60, check=False)
    if closed == 1 and "batch" in command:  # its results have nowhere to go
        assert b"name a file" in done.stderr
        assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    else:
        assert done.returncode == 0 and b"Traceback" not in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "batch", "help"], indirect=True)
def test_a_full_disk_is_an_error_of_one_line(command):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert "No space left on device" in assert_refused(done.returncode, "", done.stderr)
