"""Two thousand requests in one process, some cancelled: the C++ runtime takes no more memory than
for the first four hundred, after which the prefix cache is full."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cpp_programs import program_at

HEAP = 64 << 10
"""How many bytes the heap may grow by: 36 a request. The records of `auto` grow a little; a leaked
request would be kilobytes."""
BLOCKS = 8
"""How many buffers may be added, for windows of plans that `auto` chooses late."""
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
    *taken, ends, closed = map(json.loads, run.stdout.splitlines())
    first, last = taken[1], taken[-1]
    assert len(taken) == 10
    # Of 2,000 requests 100 were dropped unread.
    assert sum(ends["ends"].values()) == 1900 and min(ends["ends"].values()) > 15, ends
    assert set(ends["ends"]) == {"cancelled", "length", "stop"}
    assert last["heap"] - first["heap"] < HEAP, [each["heap"] for each in taken]
    assert last["resident"] - first["resident"] < RESIDENT, [each["resident"] for each in taken]
    assert last["bytes"] - first["bytes"] < HEAP, [each["bytes"] for each in taken]
    assert last["blocks"] - first["blocks"] < BLOCKS, [each["blocks"] for each in taken]
    assert first["blocks"] > 50
    assert (closed["blocks"], closed["bytes"]) == (0, 0)
