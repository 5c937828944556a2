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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from changed_pass_run import held_pass_run, slow_pass_run
from click.testing import CliRunner, Result
from manifests import real_document, replace, write_manifest

from pass_runtime.bundle.integrity import file_info
from pass_runtime.cli.main import main

PROMPT, ENTERED = "\x1b[?2004h", "\x1b[?2004l"
"""Bracketed paste is on while a line may be typed, and off once it was entered."""
PASS_RUN = [sys.executable, "-m", "pass_runtime.cli.main"]
SLOW_PASS_RUN = slow_pass_run(0.05)
"""With 0.05 s before each pass, so that a test can interrupt a tiny model."""


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
        """Return what was written since the last call, up to `text`."""
        while text not in self.shown:
            self._read(f"{text!r} did not come")
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def wait_for_characters(self, count: int) -> None:
        while len(self.shown) < count:
            self._read(f"{count} characters did not come")

    def _read(self, problem: str) -> None:
        """Fail with `problem` if no output comes within a minute."""
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
    """Run the command in this process."""
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
    """Return the only line on stderr, an error."""
    assert (status, stdout) == (2, ""), stderr
    assert re.fullmatch("error: .+\n", stderr), stderr
    return stderr


def refusal(*arguments: object, stdin: str | bytes = "") -> str:
    result = pass_run(*arguments, stdin=stdin)
    return assert_refused(result.exit_code, result.stdout, result.stderr)


def bundle_copy(bundle: Path, target: Path, *, without: str = "") -> Path:
    """Return `target`, which gets links to the files of a bundle but `without`."""
    target.mkdir()
    for file in bundle.iterdir():
        if file.name != without:
            (target / file.name).symlink_to(file)
    return target


def changed_bundle(
    bundle: Path, target: Path, *, template: str | None = "", **of_model: object
) -> Path:
    """Return a copy with other fields of its model and another chat template: None for none."""
    document = real_document(bundle_copy(bundle, target))
    document["model"] |= of_model
    name = "chat_template.jinja"
    if template is None:
        (target / name).unlink()
        del document["files"][name]
    elif template:
        replace(target / name, template.encode())
        document["files"][name] = file_info(target / name).model_dump()
    write_manifest(target, document)
    return target


def write_jsonl(path: Path, *objects: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects), encoding="utf-8")
    return path


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Batch:
    """`pass-run batch` with a bundle, and with its files in a folder."""

    def __init__(self, bundle: Path, folder: Path, *flags: str) -> None:
        self.bundle, self.flags = bundle, flags
        self.requests, self.results = folder / "in.jsonl", folder / "out.jsonl"

    def command(self, *flags: object) -> tuple[object, ...]:
        return ("batch", self.bundle, self.requests, self.results, *self.flags, *flags)

    def run(self, *flags: object, status: int = 0) -> str:
        """Return what is written to stderr."""
        done = pass_run(*self.command(*flags))
        assert done.exit_code == status, done.stderr
        return done.stderr

    def refusal(self, *flags: object) -> str:
        return refusal(*self.command(*flags))

    def written(self) -> list[dict]:
        return read_jsonl(self.results)

    def answers(self, *lines: object, flags: Sequence[object] = ()) -> list[dict]:
        """Return the results of these lines: texts as they are, others as JSON."""
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.requests.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        self.run(*flags)
        return self.written()

    @contextmanager
    def held(self, lines: int, *flags: object) -> Iterator[subprocess.Popen[str]]:
        """Run the command, and yield its process when it has written `lines` results. It begins no
        further pass."""
        command = held_pass_run(self.results.parent, self.results.name, lines)
        command += map(str, self.command(*flags, "--max-batch-size", 1))
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
            while not self.results.is_file() or self.results.read_bytes().count(b"\n") < lines:
                assert running.poll() is None
            yield running
