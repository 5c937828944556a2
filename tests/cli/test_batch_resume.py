"""A stopped batch continues where it was, and never behind results that are not its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from pass_run import SLOW_PASS_RUN, pass_run, refusal

FLAGS = ("--max-new-tokens", "6", "--ignore-eos", "--plan", "two-pass", "--temperature", "1", "--seed", "3")
TIMINGS = ("prefill_seconds", "decode_seconds", "decode_tokens_per_second")


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [{"prompt": f"number {i}"} for i in range(8)]
    lines[2] = {"prompt": "wrong", "temperature": -1}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def whole(tiny_bundle: Path, requests: Path, tmp_path: Path) -> Path:
    """The results of an uninterrupted run."""
    path = tmp_path / "whole.jsonl"
    run(tiny_bundle, requests, path)
    return path


def run(bundle: Path, requests: Path, results: Path) -> str:
    done = pass_run("batch", bundle, requests, results, *FLAGS)
    assert done.exit_code == 0, done.stderr
    return done.stderr


def content(results: Path) -> list[dict]:
    """Without the timings, which differ from run to run."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    for line in lines:
        for key in TIMINGS:
            line.get("stats", {}).pop(key, None)
    return lines


def test_killed_in_the_middle(tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path):
    results = tmp_path / "out.jsonl"
    command = [*SLOW_PASS_RUN, "batch", str(tiny_bundle), str(requests), str(results), *FLAGS]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        while not results.is_file() or results.read_bytes().count(b"\n") < 4:
            assert running.poll() is None
        running.kill()
    before = results.read_bytes()
    done = before.count(b"\n")
    assert 4 <= done < 8
    assert f"continuing after line {done} of 8" in run(tiny_bundle, requests, results)
    assert results.read_bytes().startswith(before[: before.rfind(b"\n") + 1])  # what was done was not done again
    assert content(results) == content(whole)


@pytest.mark.parametrize("torn", [1, 40, -1], ids=["one byte", "40 bytes", "all but the line feed"])
def test_a_torn_last_line_is_done_again(tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path, torn: int):
    lines = whole.read_bytes().splitlines(keepends=True)
    results = tmp_path / "out.jsonl"
    results.write_bytes(b"".join(lines[:4]) + lines[4][:torn])
    assert "continuing after line 4 of 8" in run(tiny_bundle, requests, results)
    assert results.read_bytes().startswith(b"".join(lines[:4]))
    assert content(results) == content(whole)


def test_a_torn_first_line(tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path):
    results = tmp_path / "out.jsonl"
    results.write_bytes(whole.read_bytes()[:60])
    run(tiny_bundle, requests, results)
    assert content(results) == content(whole)


def test_a_complete_file_is_left_alone(tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path):
    before = whole.read_bytes()
    message = run(tmp_path / "no bundle is opened", requests, whole)
    assert "8 results" in message and "1 failed" in message
    assert whole.read_bytes() == before


def test_new_lines_at_the_end_are_answered(tiny_bundle: Path, requests: Path, whole: Path):
    before = whole.read_bytes()
    with requests.open("a") as file:
        file.write('{"prompt": "one more"}\n')
    run(tiny_bundle, requests, whole)
    assert whole.read_bytes().startswith(before)
    assert content(whole)[-1]["line"] == 9


@pytest.mark.parametrize("change", ["request", "removed request", "flag", "foreign file", "seed"])
def test_results_of_something_else(tiny_bundle: Path, requests: Path, whole: Path, change: str):
    lines = requests.read_text().splitlines(keepends=True)
    flags = FLAGS
    if change == "request":
        requests.write_text("".join([*lines[:3], '{"prompt": "other"}\n', *lines[4:]]))
    elif change == "removed request":
        requests.write_text("".join(lines[:7]))
    elif change == "flag":
        flags = ("--max-new-tokens", "7", *FLAGS[2:])
    elif change == "seed":
        flags = (*FLAGS[:-1], "4")  # the first lines were drawn with seed 3: one file must not mix two seeds
        whole.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:4]))
    else:
        whole.write_text("notes that somebody needs\n")
    before = whole.read_bytes()
    assert "whole.jsonl holds results of other requests or flags" in refusal(
        "batch", tiny_bundle, requests, whole, *flags
    )
    assert whole.read_bytes() == before


def test_a_foreign_file_without_line_feed_is_not_emptied(tiny_bundle: Path, tmp_path: Path):
    """It looks like one torn line, but not like one of ours. Easily done: the requests file named twice."""
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"prompt": "the only request"}')
    refusal("batch", tiny_bundle, requests, requests, *FLAGS)
    assert requests.read_text() == '{"prompt": "the only request"}'
