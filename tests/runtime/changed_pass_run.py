"""Commands of a pass-run that tests delay or hold while it decodes."""

from __future__ import annotations

import sys
from pathlib import Path


def pass_run_with_hook(*lines: str) -> list[str]:
    """lines: Python that runs before every pass."""
    return [
        sys.executable,
        "-c",
        "import time\n"
        "from pathlib import Path\n"
        "from pass_runtime.backends.base import Backend\n"
        "from pass_runtime.cli.main import main\n"
        "run = Backend.run\n"
        "def run_after_hook(*args):\n"
        + "".join(f"    {line}\n" for line in lines)
        + "    return run(*args)\n"
        "Backend.run = run_after_hook\n"
        "main()\n",
    ]


def slow_pass_run(seconds: float) -> list[str]:
    return pass_run_with_hook(f"time.sleep({seconds})")


def held_pass_run(directory: Path, pattern: str, lines: int) -> list[str]:
    """No pass begins once a file of `directory` that fits `pattern` has this many lines."""
    return pass_run_with_hook(
        "from pass_runtime.decode.worker import _live_workers",
        f"files = Path({str(directory)!r})",
        f"while any(file.read_bytes().count(b'\\n') >= {lines} for file in "
        f"files.glob({pattern!r})):",
        # close() waits for the pass in progress
        "    if any(worker.closed for worker in _live_workers): break",
        "    time.sleep(0.05)",
    )
