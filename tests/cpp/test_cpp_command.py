"""pass-cpp as people use it: its output, and its refusals in the words of pass-run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from cpp_programs import program_at

IDS = "5,6,7"
QUICK = ("--max-new-tokens", "8", "--repeat", "2", "--prompt-ids", IDS, "--prompt-ids", "9,8,7,6")


@pytest.fixture(scope="session")
def program() -> Path:
    return program_at("pass-cpp")


def run(program: Path, *arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program, *map(str, arguments)], input=stdin, capture_output=True, timeout=60, check=False)


def output(program: Path, *arguments: object, stdin: bytes = b"") -> str:
    done = run(program, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_bench_tells_what_the_host_takes(program: Path, random_bundle: Path):
    report = json.loads(output(program, "bench", random_bundle, *QUICK, "--batch", "1,2", "--json"))
    names = ["ar", "two-pass L=6", "fused L=6", "auto"]
    assert [plan["plan"] for plan in report["plans"]] == [f"{name} x{size}" for size in (1, 2) for name in names]
    assert all(0 < plan["host_milliseconds_per_pass"] < plan["milliseconds_per_pass"] for plan in report["plans"])
    table = output(program, "bench", random_bundle, *QUICK, "--plan", "ar")
    host = table.splitlines()[2].split()[4]
    assert "of it host" in table and 0 < float(host) < 1
