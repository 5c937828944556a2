"""pass-run batch continues a run that was stopped, and leaves the results of other requests
alone."""

from __future__ import annotations

import json
import shlex
import signal
from pathlib import Path

import pytest
from pass_run import (
    bundle_copy,
    changed_bundle,
    held_batch,
    pass_run,
    process,
    read_jsonl,
    refusal,
    write_jsonl,
)

FLAGS = tuple(
    shlex.split("--max-new-tokens 6 --ignore-eos --plan two-pass --temperature 1 --seed 3")
)
STATS = ("plan", "lookahead", "prompt_tokens", "generated_tokens")
"""Statistics that do not depend on which sequences decode in the same passes."""


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    lines = [{"prompt": f"number {i}"} for i in range(8)]
    lines[2] = {"prompt": "wrong", "temperature": -1}
    return write_jsonl(tmp_path / "in.jsonl", *lines)


@pytest.fixture
def whole(tiny_bundle: Path, requests: Path, tmp_path: Path) -> Path:
    path = tmp_path / "whole.jsonl"
    run(tiny_bundle, requests, path)
    return path


def run(bundle: Path, requests: Path, results: Path, *flags: str) -> str:
    done = pass_run("batch", bundle, requests, results, *FLAGS, *flags)
    assert done.exit_code == 0, done.stderr
    return done.stderr


def content(results: Path) -> list[dict]:
    lines = read_jsonl(results)
    for line in lines:
        if "stats" in line:
            line["stats"] = {key: line["stats"][key] for key in STATS}
    return lines


@pytest.mark.slow
def test_a_killed_batch_continues(tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path):
    results = tmp_path / "out.jsonl"
    with held_batch(4, tiny_bundle, requests, results, *FLAGS) as running:
        running.kill()
    before = results.read_bytes()
    done = before.count(b"\n")
    assert 4 <= done < 8
    assert f"continuing after line {done} of 8" in run(tiny_bundle, requests, results)
    assert results.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert content(results) == content(whole)


@pytest.mark.parametrize(
    ("kept", "torn"),
    [(4, 1), (4, 40), (4, -1), (0, 60)],
    ids=["one byte", "40 bytes", "all but the line feed", "the first line"],
)
def test_an_incomplete_last_line_is_done_again(
    tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path, kept: int, torn: int
):
    """kept: whole lines before it. torn: how many of its bytes are there."""
    lines = whole.read_bytes().splitlines(keepends=True)
    results = tmp_path / "out.jsonl"
    results.write_bytes(b"".join(lines[:kept]) + lines[kept][:torn])
    message = run(tiny_bundle, requests, results)
    assert not kept or f"continuing after line {kept} of 8" in message
    assert results.read_bytes().startswith(b"".join(lines[:kept]))
    assert content(results) == content(whole)


def test_a_complete_file_stays_until_requests_are_appended(
    tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path
):
    before = whole.read_bytes()
    without_trunk = bundle_copy(tiny_bundle, tmp_path / "copy", without="trunk.onnx")
    message = run(without_trunk, requests, whole)  # nothing is decoded, so no trunk is opened
    assert "8 results" in message and "1 failed" in message
    assert whole.read_bytes() == before
    with requests.open("a") as file:
        file.write('{"prompt": "one more"}\n')
    run(tiny_bundle, requests, whole)
    assert whole.read_bytes().startswith(before)
    assert content(whole)[-1]["line"] == 9


@pytest.mark.parametrize(
    "change", ["request", "removed request", "blank line", "flag", "foreign file", "seed"]
)
def test_results_of_other_requests_or_flags_are_refused(
    tiny_bundle: Path, requests: Path, whole: Path, change: str
):
    lines = requests.read_text().splitlines(keepends=True)
    flags = FLAGS
    if change == "request":
        requests.write_text("".join([*lines[:3], '{"prompt": "other"}\n', *lines[4:]]))
    elif change == "removed request":
        requests.write_text("".join(lines[:7]))
    elif change == "blank line":  # the line numbers and seeds after it change
        requests.write_text("\n" + requests.read_text())
    elif change == "flag":
        flags = ("--max-new-tokens", "7", *FLAGS[2:])
    elif change == "seed":  # one file must not mix lines of two seeds
        flags = (*FLAGS[:-1], "4")
        whole.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:4]))
    else:
        whole.write_text("notes that somebody needs\n")
    before = whole.read_bytes()
    line = refusal("batch", tiny_bundle, requests, whole, *flags)
    assert "whole.jsonl holds results of other requests or flags" in line
    assert whole.read_bytes() == before


def test_a_requests_file_named_as_results_is_not_emptied(tiny_bundle: Path, tmp_path: Path):
    """Without a line feed, it looks like one incomplete line of results."""
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"prompt": "the only request"}')
    refusal("batch", tiny_bundle, requests, requests, *FLAGS)
    assert requests.read_text() == '{"prompt": "the only request"}'


@pytest.mark.parametrize("change", ["look-ahead rows", "template", "end token"])
def test_results_of_another_bundle_are_refused(
    tiny_bundle: Path, random_bundle: Path, requests: Path, whole: Path, tmp_path: Path, change: str
):
    if change == "look-ahead rows":
        bundle = random_bundle
    elif change == "template":
        bundle = bundle_copy(tiny_bundle, tmp_path / "copy", without="chat_template.jinja")
        (bundle / "chat_template.jinja").write_text("{{ messages[0].content }}")
    else:
        bundle = changed_bundle(tiny_bundle, tmp_path / "copy", eos_token_ids=[5])
    assert "or of another bundle" in refusal("batch", bundle, requests, whole, *FLAGS)


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_killed_run_leaves_no_lock(
    tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path
):
    results = tmp_path / "out.jsonl"
    with held_batch(1, tiny_bundle, requests, results, *FLAGS) as running:
        second = process("batch", tiny_bundle, requests, results, *FLAGS)
        assert running.poll() is None
        running.kill()
    reason = f"another run is writing {results}; wait for it, or choose another name"
    assert (second.returncode, second.stdout, second.stderr) == (2, "", f"error: {reason}\n")
    run(tiny_bundle, requests, results)
    assert content(results) == content(whole)
    assert sorted(tmp_path.iterdir()) == sorted([requests, results, whole])


@pytest.fixture
def answers(whole: Path) -> list[dict]:
    """Make the results of lines 2, 5 and 6 of `whole` errors. Return those from before. (Line 3
    always fails.)"""
    before = content(whole)
    lines = read_jsonl(whole)
    for i in (1, 4, 5):
        lines[i] = {key: lines[i][key] for key in ("line", "request")} | {"error": "out of memory"}
    write_jsonl(whole, *lines)
    return before


def test_failed_lines_are_done_again_only_with_retry_failed(
    tiny_bundle: Path, requests: Path, whole: Path, answers: list[dict], tmp_path: Path
):
    before = whole.read_bytes()
    assert "8 results" in (message := run(tiny_bundle, requests, whole)) and "4 failed" in message
    assert whole.read_bytes() == before
    with requests.open("a") as file:
        file.write('{"prompt": "one more"}\n')
    message = run(tiny_bundle, requests, whole, "--retry-failed")
    for words in ("doing 4 failed ones again", "9 results", "1 failed"):
        assert words in message
    assert content(whole)[:8] == answers
    assert content(whole)[8]["line"] == 9
    assert sorted(tmp_path.iterdir()) == sorted([requests, whole])  # no temporary file is left


@pytest.mark.slow
def test_an_interrupted_retry_keeps_its_results_in_order(
    tiny_bundle: Path, requests: Path, whole: Path, answers: list[dict], tmp_path: Path
):
    with held_batch(9, tiny_bundle, requests, whole, *FLAGS, "--retry-failed") as running:
        running.send_signal(signal.SIGINT)  # after the first new result
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 130 and "interrupted" in errors
    lines = content(whole)
    assert lines[:3] == answers[:3] and lines[7] == answers[7]
    # Line 5 was decoding, so it may be done.
    assert lines[4] == answers[4] or lines[4]["error"] == "out of memory"
    assert lines[5]["error"] == "out of memory"
    assert sorted(tmp_path.iterdir()) == sorted([requests, whole])
    run(tiny_bundle, requests, whole, "--retry-failed")
    assert content(whole) == answers


@pytest.mark.slow
def test_a_killed_retry_keeps_its_results(
    tiny_bundle: Path, requests: Path, whole: Path, answers: list[dict], tmp_path: Path
):
    """They are at the end of the file, and the next run sorts them."""
    with held_batch(9, tiny_bundle, requests, whole, *FLAGS, "--retry-failed") as running:
        second = process("batch", tiny_bundle, requests, whole, *FLAGS)
        assert running.poll() is None
        running.kill()
    assert "another run is writing" in second.stderr
    killed = whole.read_bytes()
    requests.write_text('{"prompt": "other"}\n' + requests.read_text())
    refusal("batch", tiny_bundle, requests, whole, *FLAGS)
    assert whole.read_bytes() == killed, "results of other requests are left as they are"
    requests.write_text(requests.read_text().partition("\n")[2])
    run(tiny_bundle, requests, whole)
    lines = content(whole)
    assert [line["line"] for line in lines] == list(range(1, 9))
    assert lines[:3] == answers[:3] and lines[5]["error"] == "out of memory"


def test_a_killed_retry_of_the_last_line(tiny_bundle: Path, requests: Path, whole: Path):
    """The file is in order, but has two results of the last line."""
    *others, last = read_jsonl(whole)
    failed = {key: last[key] for key in ("line", "request")} | {"error": "out of memory"}
    expected = whole.read_text()
    write_jsonl(whole, *others, failed, last)
    assert "8 results" in run(tiny_bundle, requests, whole)
    assert [*map(json.loads, expected.splitlines())] == read_jsonl(whole)


def test_lines_whose_results_were_removed_are_answered_again(
    tiny_bundle: Path, requests: Path, whole: Path
):
    before = content(whole)
    lines = whole.read_text().splitlines(keepends=True)
    whole.write_text("".join(lines[:3] + lines[5:]))
    run(tiny_bundle, requests, whole)
    assert content(whole) == before
