"""Commands for the real pass-run with something to do before every pass."""

from __future__ import annotations

import sys
from pathlib import Path


def pass_run_after(*lines: str) -> list[str]:
    """A pass-run that runs these lines of Python before every pass."""
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
    """A pass-run with slow passes, because a tiny model ends before it can be interrupted."""
    return pass_run_after(f"time.sleep({seconds})")


def held_pass_run(where: Path, pattern: str, lines: int) -> list[str]:
    """A pass-run in which no pass begins once a file of that pattern in `where` has so many lines,
    so that a signal always arrives in the middle. Running requests, at most two with
    --max-batch-size 1, may still end."""
    return pass_run_after(
        "from pass_runtime.decode.worker import _live_workers",
        f"files = Path({str(where)!r})",
        f"while any(file.read_bytes().count(b'\\n') >= {lines} for file in "
        f"files.glob({pattern!r})):",
        # close() waits for the pass in progress
        "    if any(worker.closed for worker in _live_workers): break",
        "    time.sleep(0.05)",
    )
