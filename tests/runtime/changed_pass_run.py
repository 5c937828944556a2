"""Commands that start pass-run with lines of Python that it runs before every pass, so that tests
can signal, delay or hold it while it decodes."""

from __future__ import annotations

import sys
from pathlib import Path


def pass_run_with_hook(*lines: str) -> list[str]:
    """Return the command of a pass-run that runs these lines before every pass."""
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
    """Return the command of a pass-run whose passes take `seconds` longer: a tiny model would end
    before it can be interrupted."""
    return pass_run_with_hook(f"time.sleep({seconds})")


def held_pass_run(directory: Path, pattern: str, lines: int) -> list[str]:
    """Return the command of a pass-run that begins no pass once a file of `directory` whose name
    fits `pattern` has this many lines, so that a signal always arrives before it is done. Requests
    whose last pass has begun, at most two with --max-batch-size 1, still end."""
    return pass_run_with_hook(
        "from pass_runtime.decode.worker import _live_workers",
        f"files = Path({str(directory)!r})",
        f"while any(file.read_bytes().count(b'\\n') >= {lines} for file in "
        f"files.glob({pattern!r})):",
        # close() waits for the pass in progress
        "    if any(worker.closed for worker in _live_workers): break",
        "    time.sleep(0.05)",
    )
