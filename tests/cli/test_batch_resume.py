"""pass-run batch continues a run that was stopped, and leaves the results of other requests
alone."""

from __future__ import annotations

import shlex
import signal

import pytest
from pass_run import Batch, bundle_copy, changed_bundle, process, write_jsonl

FLAGS = shlex.split("--max-new-tokens 6 --ignore-eos --plan two-pass --temperature 1 --seed 3")
STATS = ("plan", "lookahead", "prompt_tokens", "generated_tokens")
"""Statistics that do not depend on which sequences decode in the same passes."""


@pytest.fixture
def batch(tiny_bundle, tmp_path):
    """Eight requests, of which the third is wrong."""
    batch = Batch(tiny_bundle, tmp_path, *FLAGS)
    lines = [{"prompt": f"number {i}"} for i in range(8)]
    lines[2] = {"prompt": "wrong", "temperature": -1}
    write_jsonl(batch.requests, *lines)
    return batch


@pytest.fixture
def done(batch):
    """The batch with all its results."""
    batch.run()
    return batch


def content(batch):
    lines = batch.written()
    for line in lines:
        if "stats" in line:
            line["stats"] = {key: line["stats"][key] for key in STATS}
    return lines


def append_request(batch):
    with batch.requests.open("a") as file:
        file.write('{"prompt": "one more"}\n')


@pytest.mark.slow
def test_a_killed_batch_continues(done):
    whole = content(done)
    done.results.unlink()
    with done.held(4) as running:
        second = process(*done.command())
        assert running.poll() is None
        running.kill()
    reason = f"another run is writing {done.results}; wait for it, or choose another name"
    assert (second.returncode, second.stdout, second.stderr) == (2, "", f"error: {reason}\n")
    before = done.results.read_bytes()
    count = before.count(b"\n")
    assert 4 <= count < 8
    assert f"continuing after line {count} of 8" in done.run()
    assert done.results.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert content(done) == whole
    assert sorted(done.results.parent.iterdir()) == [done.requests, done.results]  # and no lock


@pytest.mark.parametrize(
    ("kept", "torn"),
    [(4, 1), (4, 40), (4, -1), (0, 60)],
    ids=["one byte", "40 bytes", "all but the line feed", "the first line"],
)
def test_an_incomplete_last_line_is_done_again(done, kept, torn):
    """kept: whole lines before it. torn: how many of its bytes are there."""
    lines, whole = done.results.read_bytes().splitlines(keepends=True), content(done)
    done.results.write_bytes(b"".join(lines[:kept]) + lines[kept][:torn])
    message = done.run()
    assert not kept or f"continuing after line {kept} of 8" in message
    assert done.results.read_bytes().startswith(b"".join(lines[:kept]))
    assert content(done) == whole


def test_a_complete_file_stays_until_requests_are_appended(done, tiny_bundle, tmp_path):
    before = done.results.read_bytes()
    done.bundle = bundle_copy(tiny_bundle, tmp_path / "copy", without="trunk.onnx")
    message = done.run()  # nothing is decoded, so no trunk is opened
    assert "8 results" in message and "1 failed" in message
    assert done.results.read_bytes() == before
    append_request(done)
    done.bundle = tiny_bundle
    done.run()
    assert done.results.read_bytes().startswith(before)
    assert done.written()[-1]["line"] == 9


@pytest.mark.parametrize(
    "change", ["request", "removed request", "blank line", "flag", "foreign file", "seed"]
)
def test_results_of_other_requests_or_flags_are_refused(done, change):
    lines, flags = done.requests.read_text().splitlines(keepends=True), ()
    if change == "request":
        done.requests.write_text("".join([*lines[:3], '{"prompt": "other"}\n', *lines[4:]]))
    elif change == "removed request":
        done.requests.write_text("".join(lines[:7]))
    elif change == "blank line":  # the line numbers and seeds after it change
        done.requests.write_text("\n" + done.requests.read_text())
    elif change == "flag":
        flags = ("--max-new-tokens", "7")
    elif change == "seed":  # one file must not mix lines of two seeds
        flags = ("--seed", "4")
        write_jsonl(done.results, *done.written()[:4])
    else:
        done.results.write_text("notes that somebody needs\n")
    before = done.results.read_bytes()
    assert "out.jsonl holds results of other requests or flags" in done.refusal(*flags)
    assert done.results.read_bytes() == before


def test_a_requests_file_named_as_results_is_not_emptied(batch):
    """Without a line feed, it looks like one incomplete line of results."""
    batch.requests.write_text('{"prompt": "the only request"}')
    batch.results = batch.requests
    batch.refusal()
    assert batch.requests.read_text() == '{"prompt": "the only request"}'


@pytest.mark.parametrize("change", ["look-ahead rows", "template", "end token"])
def test_results_of_another_bundle_are_refused(done, tiny_bundle, random_bundle, tmp_path, change):
    if change == "look-ahead rows":
        done.bundle = random_bundle
    elif change == "template":
        done.bundle = bundle_copy(tiny_bundle, tmp_path / "copy", without="chat_template.jinja")
        (done.bundle / "chat_template.jinja").write_text("{{ messages[0].content }}")
    else:
        done.bundle = changed_bundle(tiny_bundle, tmp_path / "copy", eos_token_ids=[5])
    assert "or of another bundle" in done.refusal()


@pytest.fixture
def answers(done):
    """Make the results of lines 2, 5 and 6 errors. Return those from before. (Line 3 always
    fails.)"""
    before, lines = content(done), done.written()
    for i in (1, 4, 5):
        lines[i] = {key: lines[i][key] for key in ("line", "request")} | {"error": "out of memory"}
    write_jsonl(done.results, *lines)
    return before


def test_failed_lines_are_done_again_only_with_retry_failed(done, answers):
    before = done.results.read_bytes()
    message = done.run()
    assert "8 results" in message and "4 failed" in message
    assert done.results.read_bytes() == before
    append_request(done)
    message = done.run("--retry-failed")
    for words in ("doing 4 failed ones again", "9 results", "1 failed"):
        assert words in message
    assert content(done)[:8] == answers
    assert content(done)[8]["line"] == 9
    assert sorted(done.results.parent.iterdir()) == [done.requests, done.results]


@pytest.mark.slow
def test_an_interrupted_retry_keeps_its_results_in_order(done, answers):
    with done.held(9, "--retry-failed") as running:
        running.send_signal(signal.SIGINT)  # after the first new result
        _, errors = running.communicate(timeout=30)
    assert running.returncode == 130 and "interrupted" in errors
    lines = content(done)
    assert lines[:3] == answers[:3] and lines[7] == answers[7]
    # Line 5 was decoding, so it may be done.
    assert lines[4] == answers[4] or lines[4]["error"] == "out of memory"
    assert lines[5]["error"] == "out of memory"
    assert sorted(done.results.parent.iterdir()) == [done.requests, done.results]
    done.run("--retry-failed")
    assert content(done) == answers


@pytest.mark.slow
def test_a_killed_retry_keeps_its_results(done, answers):
    """They are at the end of the file, and the next run sorts them."""
    with done.held(9, "--retry-failed") as running:
        second = process(*done.command())
        assert running.poll() is None
        running.kill()
    assert "another run is writing" in second.stderr
    killed, requests = done.results.read_bytes(), done.requests.read_text()
    done.requests.write_text('{"prompt": "other"}\n' + requests)
    done.refusal()
    assert done.results.read_bytes() == killed, "results of other requests are left as they are"
    done.requests.write_text(requests)
    done.run()
    lines = content(done)
    assert [line["line"] for line in lines] == list(range(1, 9))
    assert lines[:3] == answers[:3] and lines[5]["error"] == "out of memory"


def test_a_killed_retry_of_the_last_line(done):
    """The file is in order, but has two results of the last line."""
    *others, last = expected = done.written()
    failed = {key: last[key] for key in ("line", "request")} | {"error": "out of memory"}
    write_jsonl(done.results, *others, failed, last)
    assert "8 results" in done.run()
    assert done.written() == expected


def test_lines_whose_results_were_removed_are_answered_again(done):
    before, lines = content(done), done.written()
    write_jsonl(done.results, *lines[:3], *lines[5:])
    done.run()
    assert content(done) == before
