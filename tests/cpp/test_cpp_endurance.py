"""After two thousand requests in one process, some of them cancelled, the C++ runtime takes no more
memory than after four hundred, when the prefix cache is full."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cpp_programs import program_at

HEAP = 64 << 10
"""How many bytes the heap may grow by: about 40 for a request. What `auto` records grows a little;
a leaked request would take kilobytes."""
BLOCKS = 8
"""How many more buffers there may be: `auto` may choose a plan late, whose windows need some."""
RESIDENT = 2 << 20
"""How many bytes the process may grow by: the allocator need not return pages to the system."""


@pytest.mark.slow
def test_memory_does_not_grow_over_two_thousand_requests(tiny_bundle: Path):
    run = subprocess.run(
        [program_at("endurance"), tiny_bundle],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *used, ends, after_close = map(json.loads, run.stdout.splitlines())
    first, last = used[1], used[-1]
    assert len(used) == 10
    # 100 of the 2,000 requests were dropped unread.
    assert sum(ends["ends"].values()) == 1900 and min(ends["ends"].values()) > 15, ends
    assert set(ends["ends"]) == {"cancelled", "length", "stop"}
    assert last["heap"] - first["heap"] < HEAP, [each["heap"] for each in used]
    assert last["resident"] - first["resident"] < RESIDENT, [each["resident"] for each in used]
    assert last["bytes"] - first["bytes"] < HEAP, [each["bytes"] for each in used]
    assert last["blocks"] - first["blocks"] < BLOCKS, [each["blocks"] for each in used]
    assert first["blocks"] > 50
    assert (after_close["blocks"], after_close["bytes"]) == (0, 0)
