"""pass-run batch where something fails that is no fault of a request: its line has the error, the
others go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pass_run import output, pass_run, refusal
from test_batch import FLAGS, write

from pass_runtime.cli.prompt_io import read_lines
from pass_runtime.decode.scheduler import Scheduler
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.session import Session

POISON = "poison"
PROMPTS = [f"number {i}" for i in range(12)]


def results_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    prompts = [*PROMPTS[:5], POISON, *PROMPTS[5:]]
    return write(tmp_path / "in.jsonl", *({"prompt": prompt, "id": prompt} for prompt in prompts))


@pytest.fixture
def poison_ids(tiny_bundle: Path) -> tuple[int, ...]:
    from pass_runtime import load

    with load(tiny_bundle, "cpu", threads=1) as session:
        return tuple(session.encode(POISON))


def assert_only_poison_failed(results: Path) -> None:
    """With its type and its message, in one line."""
    found = results_of(results)
    assert [each["id"] for each in found if "error" not in each] == PROMPTS
    assert all(len(each["token_ids"]) == 6 for each in found if "error" not in each)
    assert [(each["error"], each["unexpected"]) for each in found if "error" in each] == [
        ("ValueError: no two", True)
    ]


def test_a_request_that_cannot_be_begun(
    tiny_bundle: Path, tmp_path: Path, requests: Path, monkeypatch: pytest.MonkeyPatch
):
    encode = Session.encode

    def failing(session: Session, text: str) -> list[int]:
        if text == POISON:
            raise ValueError("no\ntwo")
        return encode(session, text)

    results = tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(Session, "encode", failing)
        done = pass_run("batch", tiny_bundle, requests, results, *FLAGS, "--max-batch-size", "2")
    assert done.exit_code == 1 and "1 failed" in done.stderr
    assert_only_poison_failed(results)
    assert (
        pass_run("batch", tiny_bundle, requests, results, *FLAGS).exit_code == 1
    )  # it has failed still
    output("batch", tiny_bundle, requests, results, *FLAGS, "--retry-failed")
    assert not any("error" in found for found in results_of(results))


def test_a_request_that_fails_under_way(
    tiny_bundle: Path,
    tmp_path: Path,
    requests: Path,
    poison_ids: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
):
    write_tokens = SequenceState.write

    def failing(sequence: SequenceState, *args: object) -> None:
        if sequence.request.prompt_ids == poison_ids:
            raise ValueError("no\ntwo")
        write_tokens(sequence, *args)

    monkeypatch.setattr(SequenceState, "write", failing)
    results = tmp_path / "out.jsonl"
    assert pass_run("batch", tiny_bundle, requests, results, *FLAGS).exit_code == 1
    assert_only_poison_failed(results)


def deadly(monkeypatch: pytest.MonkeyPatch, deadly_prompts: set[tuple[int, ...]]) -> None:
    """One of these among the sequences ends the worker, as a bug would, and with it the session."""
    scheduled = Scheduler.step

    def failing(scheduler: Scheduler) -> None:
        sequences = [*scheduler.waiting, *(slot.sequence for slot in scheduler.runner.busy)]
        if any(each.request.prompt_ids in deadly_prompts for each in sequences if each is not None):
            raise ValueError("no\ntwo")
        scheduled(scheduler)

    monkeypatch.setattr(Scheduler, "step", failing)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("batch", ["1", "4"])
def test_a_session_that_fails_is_opened_again(
    tiny_bundle: Path,
    tmp_path: Path,
    requests: Path,
    poison_ids: tuple[int, ...],
    batch: str,
    monkeypatch: pytest.MonkeyPatch,
):
    deadly(monkeypatch, {poison_ids})
    results = tmp_path / "out.jsonl"
    assert (
        pass_run(
            "batch", tiny_bundle, requests, results, *FLAGS, "--max-batch-size", batch
        ).exit_code
        == 1
    )
    assert_only_poison_failed(results)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_sessions_that_fail_one_after_another_end_the_run(
    tiny_bundle: Path, tmp_path: Path, poison_ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """Their lines have errors, as far as it came, and a later run continues."""
    requests = write(
        tmp_path / "in.jsonl", {"prompt": "a"}, *({"prompt": POISON},) * 8, {"prompt": "b"}
    )
    results = tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:
        deadly(patched, {poison_ids})
        line = refusal("batch", tiny_bundle, requests, results, *FLAGS, "--max-batch-size", "1")
    assert (
        "failed 3 times in a row, the last time at line 4: ValueError: no two" in line
        and "run again" in line
    )
    assert ["error" in found for found in results_of(results)] == [False, True, True]
    output("batch", tiny_bundle, requests, results, *FLAGS, "--retry-failed")
    assert ["error" in found for found in results_of(results)] == [False] * 10


def test_prompts_as_long_as_the_capacity(tiny_bundle: Path, tmp_path: Path):
    """They cost nobody else an answer, and another run has nothing left to do."""
    from pass_runtime import load

    with load(tiny_bundle, "cpu", threads=1) as session:
        exact = next(text for n in range(33) if len(session.encode(text := "~" * n)) == 32)
    prompts = [exact if place in (3, 7) else f"{place}" for place in range(12)]
    requests, results = (
        write(tmp_path / "in.jsonl", *({"prompt": p} for p in prompts)),
        tmp_path / "out.jsonl",
    )
    flags = ("--max-new-tokens", "6", "--ignore-eos", "--capacity", "32", "--max-batch-size", "8")
    pass_run("batch", tiny_bundle, requests, results, *flags)
    found = results_of(results)
    assert [each["line"] for each in found] == list(range(1, 13))
    assert all(
        len(found[place]["token_ids"]) == 6
        for place, prompt in enumerate(prompts)
        if prompt is not exact
    )
    assert "12 results" in pass_run("batch", tiny_bundle, requests, results, *flags).stderr


def test_more_slots_than_half_a_queue(tiny_bundle: Path, tmp_path: Path):
    """Lines wait for their slots; no queue is too short for them."""
    requests = write(tmp_path / "in.jsonl", *({"prompt": "a"},) * 2100)
    results = tmp_path / "out.jsonl"
    flags = (
        "--max-new-tokens",
        "1",
        "--ignore-eos",
        "--plan",
        "ar",
        "--capacity",
        "8",
        "--max-batch-size",
        "1024",
    )
    output("batch", tiny_bundle, requests, results, *flags)
    found = results_of(results)
    assert len(found) == 2100 and not [each["error"] for each in found if "error" in each]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 5000])
def test_an_id_that_no_result_could_repeat(tiny_bundle: Path, tmp_path: Path, number: str):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(
        f'{{"prompt": "a", "id": {{"of": [{number}]}}}}\n{{"prompt": "a", "id": 7}}\n'
    )
    assert pass_run("batch", tiny_bundle, requests, results, *FLAGS).exit_code == 0
    first, second = (
        json.loads(line, parse_constant=sys.exit) for line in results.read_text().splitlines()
    )
    assert "JSON" in first["error"] and "id" not in first
    assert second["id"] == 7 and len(second["token_ids"]) == 6


def test_roles_are_those_of_the_server(tiny_bundle: Path, tmp_path: Path):
    conversations = [
        [{"role": role, "content": "fox"}] for role in ("pirate", "tool", "developer", "system")
    ]
    requests = write(tmp_path / "in.jsonl", *({"messages": messages} for messages in conversations))
    results = tmp_path / "out.jsonl"
    output("batch", tiny_bundle, requests, results, *FLAGS)
    pirate, tool, developer, system = results_of(results)
    assert "messages.0.role" in pirate["error"] and "'developer'" in tool["error"]
    assert developer["prompt_ids"] == system["prompt_ids"]


def test_only_line_feeds_end_lines(tmp_path: Path):
    """JSON may hold U+2028, U+2029 and U+0085 as they are, and Python's splitlines would cut
    there."""
    path = tmp_path / "in.jsonl"
    texts = ["a\u2028b", "c\u2029d\u0085e", "f\x0c"]
    path.write_text(
        "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts),
        newline="",
    )
    assert [line.object()["prompt"] for line in read_lines(path)] == texts
