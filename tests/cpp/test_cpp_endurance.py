"""Two thousand requests in one process, with cancellations: the C++ runtime takes no more memory
than for the first four hundred, by which the prefix cache has all the texts that it keeps."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from cpp_programs import program_at

HEAP = 64 << 10
"""Bytes that the heap may grow by: 36 a request. What `auto` knows grows a little; a request is
kilobytes."""
BLOCKS = 8
"""The same in the session's own buffers: for a window of another shape, where `auto` comes to like
it late."""
RESIDENT = 2 << 20
"""The same of the process, whose pages are the allocator's to give back."""


def test_two_thousand_requests(tiny_bundle: Path):
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
    assert sum(ends["ends"].values()) == 1900 and min(ends["ends"].values()) > 15, (
        ends
    )  # 100 were dropped
    assert set(ends["ends"]) == {"cancelled", "length", "stop"}
    assert last["heap"] - first["heap"] < HEAP, [one["heap"] for one in taken]
    assert last["resident"] - first["resident"] < RESIDENT, [one["resident"] for one in taken]
    assert last["bytes"] - first["bytes"] < HEAP, [one["bytes"] for one in taken]
    assert last["blocks"] - first["blocks"] < BLOCKS, [one["blocks"] for one in taken]
    assert first["blocks"] > 50
    assert (closed["blocks"], closed["bytes"]) == (0, 0)
