"""The C++ runtime takes no more memory after 2,000 requests than after 400."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cpp_programs import program_at

HEAP = 64 << 10
"""About 40 bytes for a request: a leaked one would take kilobytes."""
BLOCKS = 8
"""`auto` may choose a plan late, whose windows need some."""
RESIDENT = 2 << 20


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
