"""The program that measures the time of a pass outside the engine."""

from __future__ import annotations

import re
import subprocess

from cpp_programs import program_at


def test_every_kind_of_request_is_timed():
    run = subprocess.run(
        [program_at("host_time"), "32", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [
        re.fullmatch(r"batch (\d+)  (.+?) +([\d.]+) us", line) for line in run.stdout.splitlines()
    ]
    assert all(lines) and len({line.groups()[:2] for line in lines if line}) == 12
    assert all(float(line[3]) > 0 for line in lines if line)
