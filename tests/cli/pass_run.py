"""Helpers that run pass-run, in this process or in one of its own."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from changed_pass_run import held_pass_run, slow_pass_run
from click.testing import CliRunner, Result

from pass_runtime.bundle.integrity import file_info
from pass_runtime.bundle.manifest import digest_of
from pass_runtime.cli.main import main

PROMPT, ENTERED = "\x1b[?2004h", "\x1b[?2004l"
"""What a terminal is sent when a line may be typed (bracketed paste on), and once it was entered
(bracketed paste off)."""
PASS_RUN = [sys.executable, "-m", "pass_runtime.cli.main"]
SLOW_PASS_RUN = slow_pass_run(0.05)
"""pass-run that waits 0.05 s before each pass, so that a test can interrupt a tiny model."""


class Terminal:
    """A command in a pseudo-terminal. shown: what it has written since the last `wait_for`."""

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
        """Wait for `text`. Return what was written since the last call, `text` included."""
        while text not in self.shown:
            self._read(f"{text!r} did not come")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def wait_for_characters(self, count: int) -> None:
        while len(self.shown) < count:
            self._read(f"{count} characters did not come")

    def _read(self, problem: str) -> None:
        """Add output to `shown`. Fail with `problem` if none comes within a minute."""
        ready, _, _ = select.select([self._master], [], [], 60)
        try:
            read = os.read(self._master, 4096) if ready else b""
        except OSError:  # the process ended
            read = b""
        assert read, f"{problem}: {self.shown!r}"
        self.shown += read.decode(errors="replace")

    def exit_status(self) -> int:
        return self.process.wait(timeout=60)


def process(*arguments: object, stdin: str | None = "") -> subprocess.CompletedProcess[str]:
    command = [*PASS_RUN, *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


def pass_run(*arguments: object, stdin: str | bytes = "") -> Result:
    """Run the command in this process. Raises its exceptions but SystemExit."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], input=stdin)
    finally:
        signal.signal(signal.SIGTERM, handler)  # pass-run takes it over
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def output(*arguments: object, stdin: str | bytes = "") -> str:
    result = pass_run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def assert_refused(status: int, stdout: str, stderr: str) -> str:
    """Assert status 2 and one line on stderr, an error. Return the line."""
    assert (status, stdout) == (2, ""), stderr
    assert re.fullmatch("error: .+\n", stderr), stderr
    return stderr


def refusal(*arguments: object, stdin: str | bytes = "") -> str:
    result = pass_run(*arguments, stdin=stdin)
    return assert_refused(result.exit_code, result.stdout, result.stderr)


def bundle_copy(bundle: Path, target: Path, *, without: str = "") -> Path:
    """Make a copy of links of a bundle, without the file `without`. Return `target`."""
    target.mkdir()
    for file in bundle.iterdir():
        if file.name != without:
            (target / file.name).symlink_to(file)
    return target


def changed_bundle(
    bundle: Path, target: Path, *, template: str | None = "", **of_model: object
) -> Path:
    """Make a copy of a bundle with other fields of its model, and another chat template: "" for the
    same, None for none."""
    bundle_copy(bundle, target, without="pass_config.json")
    manifest = json.loads((bundle / "pass_config.json").read_text())
    manifest["model"] |= of_model
    if template != "":
        (target / "chat_template.jinja").unlink()
        del manifest["files"]["chat_template.jinja"]
    if template:
        (target / "chat_template.jinja").write_text(template)
        manifest["files"]["chat_template.jinja"] = file_info(
            target / "chat_template.jinja"
        ).model_dump()
    manifest["digest"] = digest_of(manifest)
    (target / "pass_config.json").write_text(json.dumps(manifest))
    return target


def write_jsonl(path: Path, *objects: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@contextmanager
def held_batch(
    lines: int, bundle: Path, requests: Path, results: Path, *flags: str
) -> Iterator[subprocess.Popen[str]]:
    """Run `pass-run batch`, and yield its process when it has written `lines` results. It begins no
    further pass."""
    command = held_pass_run(results.parent, results.name, lines)
    arguments = ("batch", bundle, requests, results, *flags, "--max-batch-size", "1")
    with subprocess.Popen(
        [*command, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    ) as running:
        while not results.is_file() or results.read_bytes().count(b"\n") < lines:
            assert running.poll() is None
        yield running
