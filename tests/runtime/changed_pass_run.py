"""The real pass-run in a process of its own, with something to do before every pass."""

from __future__ import annotations

import sys
from pathlib import Path


def pass_run_after(*lines: str) -> list[str]:
    """Before every pass these lines of Python run."""
    return [
        sys.executable,
        "-c",
        "import time\n"
        "from pathlib import Path\n"
        "from pass_runtime.backends.base import Backend\n"
        "from pass_runtime.cli.main import main\n"
        "run = Backend.run\n"
        "def after(*args):\n"
        + "".join(f"    {line}\n" for line in lines)
        + "    return run(*args)\n"
        "Backend.run = after\n"
        "main()\n",
    ]


def slow_pass_run(seconds: float) -> list[str]:
    """Each pass slowed down: a tiny model is done before anybody can interrupt it."""
    return pass_run_after(f"time.sleep({seconds})")


def held_pass_run(where: Path, pattern: str, lines: int) -> list[str]:
    """No further pass begins once a file of that pattern in the folder `where` has that many lines:
    however late a signal is sent, it arrives in the middle. What is under way by then, which with
    --max-batch-size 1 are two requests at most, may still be done."""
    return pass_run_after(
        "from pass_runtime.decode.worker import _live_workers",
        f"files = Path({str(where)!r})",
        f"while any(file.read_bytes().count(b'\\n') >= {lines} for file in "
        f"files.glob({pattern!r})):",
        # who closes it waits for the pass in progress
        "    if any(worker.closed for worker in _live_workers): break",
        "    time.sleep(0.05)",
    )
