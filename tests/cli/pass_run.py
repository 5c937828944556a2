"""Run pass-run: in this process where only the command matters, in another one where the process does."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from pass_runtime.cli.main import main

PASS_RUN = [sys.executable, "-m", "pass_runtime.cli.main"]

# The real command, each pass slowed down so that a signal surely arrives in the middle of a tiny model's answer.
SLOW_PASS_RUN = [
    sys.executable,
    "-c",
    "import time\n"
    "from pass_runtime.backends.base import Backend\n"
    "from pass_runtime.cli.main import main\n"
    "step = Backend.step\n"
    "Backend.step = lambda *args: time.sleep(0.05) or step(*args)\n"
    "main()\n",
]


def process(*arguments: object, stdin: str | None = "") -> subprocess.CompletedProcess[str]:
    command = [*PASS_RUN, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def pass_run(*arguments: object, stdin: str | bytes = "") -> Result:
    """An exception that is not the command's own way to end is raised here."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
    finally:
        signal.signal(signal.SIGTERM, handler)  # pass-run takes it over
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def output(*arguments: object, stdin: str | bytes = "") -> str:
    """Standard output of a command that must succeed."""
    result = pass_run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def assert_refused(status: int, stdout: str, stderr: str) -> str:
    """Status 2, and nothing but one line on stderr, which is returned."""
    assert status == 2, stderr
    assert stdout == ""
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    return stderr


def refusal(*arguments: object, stdin: str | bytes = "") -> str:
    result = pass_run(*arguments, stdin=stdin)
    return assert_refused(result.exit_code, result.stdout, result.stderr)


def bundle_copy(bundle: Path, target: Path, *, without: str = "") -> Path:
    """A copy whose files are links, so that it costs nothing; `without` names a file that the caller will write."""
    target.mkdir()
    for file in bundle.iterdir():
        if file.name != without:
            (target / file.name).symlink_to(file)
    return target
