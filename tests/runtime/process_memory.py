"""What a process holds in memory, for tests of growth."""

from __future__ import annotations

import re
from pathlib import Path


def anonymous_bytes(pid: int | str = "self") -> int:
    """Memory that no file backs, swapped out or not: other processes do not change it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return (
        sum(int(size) for size in re.findall(r"(?m)^(?:RssAnon|VmSwap):\s*(\d+) kB", status)) << 10
    )
