"""Run pass-export: in this process where only the command matters, in another one where the process
does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from pass_exporter.cli import main

PASS_EXPORT = [sys.executable, "-m", "pass_exporter.cli"]


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*PASS_EXPORT, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What `process` gives, without the seconds in which Python imports torch. Another exception
    than the command's own way to end is raised here."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def error_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line on stderr of an export that must fail with status 2. Progress lines may stand
    before it."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], done.stderr
    assert "Traceback" not in done.stderr
    return errors[0]


def wait_for(directory: Path, pattern: str, running: subprocess.Popen[str]) -> Path:
    """Until something in `directory` matches."""
    for _ in range(6000):
        found = list(directory.glob(pattern))
        if found:
            return found[0]
        assert running.poll() is None, running.communicate()
        time.sleep(0.01)
    raise AssertionError(f"no {pattern} in {directory}")
