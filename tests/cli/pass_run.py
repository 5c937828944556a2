"""Run pass-run: in this process where only the command matters, in another one where the process
does."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from pathlib import Path

from changed_pass_run import slow_pass_run
from click.testing import CliRunner, Result

from pass_runtime.cli.main import main

PROMPT, ENTERED = "\x1b[?2004h", "\x1b[?2004l"
"""What a terminal is sent when a line may be typed, and when it was: paste brackets on and off."""
PASS_RUN = [sys.executable, "-m", "pass_runtime.cli.main"]
SLOW_PASS_RUN = slow_pass_run(0.05)


class Terminal:
    """A command with a terminal of its own, as somebody who types at it."""

    def __init__(self, *arguments: object, command: list[str] = PASS_RUN) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> str:
        """-> what was shown since the last wait, up to `text`."""
        while text not in self.shown:
            self._read(f"{text!r} did not come")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def wait_for_characters(self, count: int) -> None:
        """After the last wait."""
        while len(self.shown) < count:
            self._read(f"{count} characters did not come")

    def _read(self, problem: str) -> None:
        ready, _, _ = select.select([self._master], [], [], 60)
        try:
            read = os.read(self._master, 4096) if ready else b""
        except OSError:  # the process ended
            read = b""
        assert read, f"{problem}: {self.shown!r}"
        self.shown += read.decode(errors="replace")

    def end(self) -> int:
        """The exit status."""
        return self.process.wait(timeout=60)


def process(*arguments: object, stdin: str | None = "") -> subprocess.CompletedProcess[str]:
    command = [*PASS_RUN, *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


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
    assert stderr.startswith("error: ") and stderr.count("\n") == 1 and stderr.endswith("\n"), (
        stderr
    )
    return stderr


def refusal(*arguments: object, stdin: str | bytes = "") -> str:
    result = pass_run(*arguments, stdin=stdin)
    return assert_refused(result.exit_code, result.stdout, result.stderr)


def bundle_copy(bundle: Path, target: Path, *, without: str = "") -> Path:
    """A copy whose files are links, so that it costs nothing; `without` names a file that the
    caller will write."""
    target.mkdir()
    for file in bundle.iterdir():
        if file.name != without:
            (target / file.name).symlink_to(file)
    return target
