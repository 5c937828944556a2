from __future__ import annotations

import re
from pathlib import Path


def anonymous_bytes(pid: int | str = "self") -> int:
    """Return the memory that no file backs, swapped out or not."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    sizes = re.findall(r"(?m)^(?:RssAnon|VmSwap):\s*(\d+) kB", status)
    return sum(map(int, sizes)) << 10
