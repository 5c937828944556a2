"""A stopped batch continues where it was, and never continues results that are not its own."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from changed_pass_run import held_pass_run
from pass_run import bundle_copy, pass_run, process, refusal

FLAGS = (
    "--max-new-tokens",
    "6",
    "--ignore-eos",
    "--plan",
    "two-pass",
    "--temperature",
    "1",
    "--seed",
    "3",
)
ONE_BY_ONE = ("--max-batch-size", "1")
"""Of runs that are to be caught in the middle."""
RETRY = (*ONE_BY_ONE, "--retry-failed")
COUNTS = ("plan", "lookahead", "prompt_tokens", "generated_tokens")
"""Statistics that do not depend on who else was decoding in the same passes."""


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


def run(bundle: Path, requests: Path, results: Path, *more: str) -> str:
    done = pass_run("batch", bundle, requests, results, *FLAGS, *more)
    assert done.exit_code == 0, done.stderr
    return done.stderr


def content(results: Path) -> list[dict]:
    """Without the statistics that differ from run to run."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    for line in lines:
        if "stats" in line:
            line["stats"] = {key: line["stats"][key] for key in COUNTS}
    return lines


def test_killed_in_the_middle(tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path):
    results = tmp_path / "out.jsonl"
    held = held_pass_run(tmp_path, results.name, 4)
    command = [*held, "batch", str(tiny_bundle), str(requests), str(results), *FLAGS, *ONE_BY_ONE]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        while not results.is_file() or results.read_bytes().count(b"\n") < 4:
            assert running.poll() is None
        running.kill()
    before = results.read_bytes()
    done = before.count(b"\n")
    assert 4 <= done < 8
    assert f"continuing after line {done} of 8" in run(tiny_bundle, requests, results)
    assert results.read_bytes().startswith(
        before[: before.rfind(b"\n") + 1]
    )  # what was done was not done again
    assert content(results) == content(whole)


@pytest.mark.parametrize("torn", [1, 40, -1], ids=["one byte", "40 bytes", "all but the line feed"])
def test_a_torn_last_line_is_done_again(
    tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path, torn: int
):
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


def test_a_complete_file_is_left_alone(
    tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path
):
    before = whole.read_bytes()
    no_engine = bundle_copy(
        tiny_bundle, tmp_path / "copy", without="trunk.onnx"
    )  # there is nothing to open it for
    message = run(no_engine, requests, whole)
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
        flags = (
            *FLAGS[:-1],
            "4",
        )  # the first lines were drawn with seed 3: one file must not mix two seeds
        whole.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:4]))
    else:
        whole.write_text("notes that somebody needs\n")
    before = whole.read_bytes()
    assert "whole.jsonl holds results of other requests or flags" in refusal(
        "batch", tiny_bundle, requests, whole, *flags
    )
    assert whole.read_bytes() == before


def test_a_foreign_file_without_line_feed_is_not_emptied(tiny_bundle: Path, tmp_path: Path):
    """It looks like one torn line, but not like one of ours. Easily done: the requests file named
    twice."""
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"prompt": "the only request"}')
    refusal("batch", tiny_bundle, requests, requests, *FLAGS)
    assert requests.read_text() == '{"prompt": "the only request"}'


def test_another_bundle_is_something_else(
    random_bundle: Path, requests: Path, whole: Path, tmp_path: Path
):
    """Of the same model and with the same vocabulary: only its look-ahead rows differ."""
    before = whole.read_bytes()
    whole.write_bytes(b"".join(before.splitlines(keepends=True)[:4]))
    assert "or of another bundle" in refusal("batch", random_bundle, requests, whole, *FLAGS)


@pytest.mark.parametrize("change", ["template", "end token"])
def test_what_else_decides_the_text(
    tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path, change: str
):
    name = "chat_template.jinja" if change == "template" else "pass_config.json"
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without=name)
    if change == "template":
        (copy / name).write_text("{{ messages[0].content }}")
    else:
        manifest = json.loads((tiny_bundle / name).read_text())
        manifest["model"]["eos_token_ids"] = [5]
        (copy / name).write_text(json.dumps(manifest))
    assert "or of another bundle" in refusal("batch", copy, requests, whole, *FLAGS)


def test_a_blank_line_before_others_makes_them_other_requests(
    tiny_bundle: Path, requests: Path, whole: Path
):
    """Their line numbers and seeds change."""
    requests.write_text("\n" + requests.read_text())
    refusal("batch", tiny_bundle, requests, whole, *FLAGS)


def test_a_second_run_is_refused_and_a_killed_one_leaves_no_lock(
    tiny_bundle: Path, requests: Path, whole: Path, tmp_path: Path
):
    results = tmp_path / "out.jsonl"
    held = held_pass_run(tmp_path, results.name, 1)
    command = [*held, "batch", str(tiny_bundle), str(requests), str(results), *FLAGS, *ONE_BY_ONE]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        while not results.is_file() or results.read_bytes().count(b"\n") < 1:
            assert running.poll() is None
        second = process("batch", tiny_bundle, requests, results, *FLAGS)
        assert running.poll() is None
        running.kill()
    assert (second.returncode, second.stdout) == (2, "")
    assert (
        second.stderr
        == f"error: another run is writing {results}; wait for it, or choose another name\n"
    )
    run(tiny_bundle, requests, results)
    assert content(results) == content(whole)
    assert sorted(tmp_path.iterdir()) == sorted([requests, results, whole])


@pytest.fixture
def with_failures(whole: Path) -> list[dict]:
    """`whole`, as if lines 2, 5 and 6 had failed for a reason that has passed; line 3 is wrong for
    good."""
    before = content(whole)
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    for i in (1, 4, 5):
        lines[i] = {key: lines[i][key] for key in ("line", "request")} | {"error": "out of memory"}
    whole.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return before


def test_failed_lines_are_done_again_only_on_request(
    tiny_bundle: Path, requests: Path, whole: Path, with_failures: list[dict], tmp_path: Path
):
    failing = whole.read_bytes()
    assert "8 results" in (message := run(tiny_bundle, requests, whole)) and "4 failed" in message
    assert whole.read_bytes() == failing
    with requests.open("a") as file:
        file.write('{"prompt": "one more"}\n')
    message = run(tiny_bundle, requests, whole, "--retry-failed")
    assert (
        "doing 4 failed ones again" in message and "9 results" in message and "1 failed" in message
    )
    assert content(whole)[:8] == with_failures
    assert content(whole)[8]["line"] == 9
    assert sorted(tmp_path.iterdir()) == sorted([requests, whole])  # nothing is left beside


def test_an_interrupted_retry_keeps_what_it_did(
    tiny_bundle: Path, requests: Path, whole: Path, with_failures: list[dict], tmp_path: Path
):
    """In the order of the requests, as after any other run."""
    held = held_pass_run(tmp_path, whole.name, 9)  # once one more result is in the file
    command = [*held, "batch", str(tiny_bundle), str(requests), str(whole), *FLAGS, *RETRY]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        while whole.read_bytes().count(b"\n") < 9:
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 130 and "interrupted" in errors
    now = content(whole)
    assert now[:3] == with_failures[:3] and now[7] == with_failures[7]
    assert (
        now[4] == with_failures[4] or now[4]["error"] == "out of memory"
    )  # it was under way, as the next one
    assert now[5]["error"] == "out of memory"
    assert sorted(tmp_path.iterdir()) == sorted([requests, whole])
    run(tiny_bundle, requests, whole, "--retry-failed")
    assert content(whole) == with_failures


def test_a_killed_retry_keeps_what_it_did(
    tiny_bundle: Path, requests: Path, whole: Path, with_failures: list[dict], tmp_path: Path
):
    """Its results stand at the end of the file, still locked, until the next run sorts it."""
    held = held_pass_run(tmp_path, whole.name, 9)
    command = [*held, "batch", str(tiny_bundle), str(requests), str(whole), *FLAGS, *RETRY]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        while whole.read_bytes().count(b"\n") < 9:
            assert running.poll() is None
        second = process("batch", tiny_bundle, requests, whole, *FLAGS)
        assert running.poll() is None
        running.kill()
    assert "another run is writing" in second.stderr
    killed = whole.read_bytes()
    requests.write_text('{"prompt": "other"}\n' + requests.read_text())
    refusal("batch", tiny_bundle, requests, whole, *FLAGS)
    assert whole.read_bytes() == killed, "what belongs to other requests is left as it is"
    requests.write_text(requests.read_text().partition("\n")[2])
    run(tiny_bundle, requests, whole)
    now = content(whole)
    assert [each["line"] for each in now] == list(range(1, 9))
    assert now[:3] == with_failures[:3] and now[5]["error"] == "out of memory"


def test_a_killed_retry_of_the_last_line(tiny_bundle: Path, requests: Path, whole: Path):
    """Its results are in the order of the requests, but the last line has two."""
    *others, last = whole.read_text().splitlines(keepends=True)
    failed = {key: json.loads(last)[key] for key in ("line", "request")} | {
        "error": "out of memory"
    }
    whole.write_text("".join([*others, json.dumps(failed) + "\n", last]))
    assert "8 results" in run(tiny_bundle, requests, whole)
    assert whole.read_text() == "".join([*others, last])


def test_results_may_be_removed(tiny_bundle: Path, requests: Path, whole: Path):
    """Their lines are answered again."""
    before = content(whole)
    lines = whole.read_text().splitlines(keepends=True)
    whole.write_text("".join(lines[:3] + lines[5:]))
    run(tiny_bundle, requests, whole)
    assert content(whole) == before
