"""Runs a command in this process, or in a process of its own for tests of the process itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

import pass_exporter.cli

PASS_EXPORT = [sys.executable, "-m", "pass_exporter.cli"]


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*PASS_EXPORT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def command(
    *arguments: object, main: click.Command = pass_exporter.cli.main
) -> subprocess.CompletedProcess[str]:
    """Do as `process` does in this process, which has imported torch."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error of a command that must have failed: one line, the last on stderr."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:] and "Traceback" not in done.stderr, done.stderr
    return errors[0]


def wait_for(directory: Path, pattern: str, running: subprocess.Popen[str]) -> Path:
    while True:
        for path in directory.glob(pattern):
            return path
        assert running.poll() is None, running.communicate()
        time.sleep(0.01)
