"""pass-run batch when requests or sessions fail: all other lines are answered."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pass_run import output, pass_run, read_jsonl, refusal, write_jsonl
from replacing import export_again
from test_batch import FLAGS, answers

from pass_runtime.cli.prompt_io import read_lines
from pass_runtime.decode.engine import Engine
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.session import Session

POISON = "poison"
"""The prompt that the tests make fail."""
PROMPTS = [f"number {i}" for i in range(12)]


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    prompts = [*PROMPTS[:5], POISON, *PROMPTS[5:]]
    return write_jsonl(
        tmp_path / "in.jsonl", *({"prompt": prompt, "id": prompt} for prompt in prompts)
    )


@pytest.fixture
def poison_ids(tiny_bundle: Path) -> tuple[int, ...]:
    from pass_runtime import load

    with load(tiny_bundle, "cpu", threads=1) as session:
        return tuple(session.encode(POISON))


def fail_encoding(monkeypatch: pytest.MonkeyPatch, _: tuple[int, ...]) -> None:
    encode = Session.encode

    def failing(session: Session, text: str) -> list[int]:
        if text == POISON:
            raise ValueError("no\ntwo")
        return encode(session, text)

    monkeypatch.setattr(Session, "encode", failing)


def fail_writing(monkeypatch: pytest.MonkeyPatch, poison_ids: tuple[int, ...]) -> None:
    write = SequenceState.write

    def failing(sequence: SequenceState, *args: object) -> None:
        if sequence.request.prompt_ids == poison_ids:
            raise ValueError("no\ntwo")
        write(sequence, *args)

    monkeypatch.setattr(SequenceState, "write", failing)


def fail_sessions(monkeypatch: pytest.MonkeyPatch, poison_ids: tuple[int, ...]) -> None:
    """Make the session fail at a step with this prompt."""
    step = Engine.step

    def failing(engine: Engine) -> None:
        sequences = [*engine.waiting, *(slot.sequence for slot in engine.slots)]
        if any(each.request.prompt_ids == poison_ids for each in sequences if each is not None):
            raise ValueError("no\ntwo")
        step(engine)

    monkeypatch.setattr(Engine, "step", failing)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("fail", "slots"),
    [(fail_encoding, 2), (fail_writing, 2), (fail_sessions, 1), (fail_sessions, 4)],
)
def test_a_request_that_fails_fails_no_other(
    tiny_bundle: Path,
    tmp_path: Path,
    requests: Path,
    poison_ids: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[pytest.MonkeyPatch, tuple[int, ...]], None],
    slots: int,
):
    results = tmp_path / "out.jsonl"
    command = ("batch", tiny_bundle, requests, results, *FLAGS)
    with monkeypatch.context() as patched:
        fail(patched, poison_ids)
        done = pass_run(*command, "--max-batch-size", slots)
    assert done.exit_code == 1 and "1 failed" in done.stderr
    answered = [result for result in read_jsonl(results) if "error" not in result]
    assert [result["id"] for result in answered] == PROMPTS
    assert all(len(result["token_ids"]) == 6 for result in answered)
    (failed,) = [result for result in read_jsonl(results) if "error" in result]
    assert (failed["error"], failed["unexpected"]) == ("ValueError: no two", True)
    assert pass_run(*command).exit_code == 1  # the failed line is not done again
    output(*command, "--retry-failed")
    assert not any("error" in result for result in read_jsonl(results))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_sessions_that_fail_one_after_another_end_the_run(
    tiny_bundle: Path, tmp_path: Path, poison_ids: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    requests = write_jsonl(
        tmp_path / "in.jsonl", {"prompt": "a"}, *({"prompt": POISON},) * 8, {"prompt": "b"}
    )
    results = tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:
        fail_sessions(patched, poison_ids)
        line = refusal("batch", tiny_bundle, requests, results, *FLAGS, "--max-batch-size", "1")
    assert "failed 3 times in a row, the last time at line 4: ValueError: no two" in line
    assert "run again" in line
    assert ["error" in result for result in read_jsonl(results)] == [False, True, True]
    output("batch", tiny_bundle, requests, results, *FLAGS, "--retry-failed")
    assert ["error" in result for result in read_jsonl(results)] == [False] * 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_run_mixes_the_texts_of_two_bundles(
    tiny_bundle: Path,
    random_bundle: Path,
    tmp_path: Path,
    requests: Path,
    poison_ids: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
):
    """A session fails after its bundle was exported again."""
    bundle, results = tmp_path / "bundle", tmp_path / "out.jsonl"
    shutil.copytree(tiny_bundle, bundle)
    close = Session.close
    command = ("batch", bundle, requests, results, *FLAGS, "--max-batch-size", "1")
    with monkeypatch.context() as patched:
        fail_sessions(patched, poison_ids)
        patched.setattr(
            Session, "close", lambda each: (close(each), export_again(bundle, random_bundle))
        )
        assert f"{bundle} has changed since this run began" in refusal(*command)
    assert [result["id"] for result in read_jsonl(results)] == PROMPTS[: len(read_jsonl(results))]
    assert "or of another bundle" in refusal(*command)
    export_again(bundle, tiny_bundle)
    output(*command)
    assert len(read_jsonl(results)) == len(PROMPTS) + 1


def test_prompts_as_long_as_the_capacity_fail_no_other_line(tiny_bundle: Path, tmp_path: Path):
    from pass_runtime import load

    with load(tiny_bundle, "cpu", threads=1) as session:
        full = next(text for n in range(33) if len(session.encode(text := "~" * n)) == 32)
    prompts = [full if i in (3, 7) else f"{i}" for i in range(12)]  # 32 is the KV capacity
    requests = write_jsonl(tmp_path / "in.jsonl", *({"prompt": prompt} for prompt in prompts))
    results = tmp_path / "out.jsonl"
    command = ("batch", tiny_bundle, requests, results, *FLAGS)
    flags = ("--capacity", "32", "--max-batch-size", "8")
    pass_run(*command, *flags)
    written = read_jsonl(results)
    assert [result["line"] for result in written] == list(range(1, 13))
    for result, prompt in zip(written, prompts, strict=True):
        assert prompt is full or len(result["token_ids"]) == 6
    assert "12 results" in pass_run(*command, *flags).stderr  # nothing is left to do


@pytest.mark.slow
def test_a_batch_with_many_slots_does_not_overfill_the_queue(tiny_bundle: Path, tmp_path: Path):
    requests = write_jsonl(tmp_path / "in.jsonl", *({"prompt": "a"},) * 2100)
    results = tmp_path / "out.jsonl"
    flags = "--max-new-tokens 1 --ignore-eos --plan ar --capacity 8 --max-batch-size 1024"
    output("batch", tiny_bundle, requests, results, *shlex.split(flags))
    written = read_jsonl(results)
    assert len(written) == 2100 and not any("error" in result for result in written)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 5000])
def test_an_id_that_is_not_json(tiny_bundle: Path, tmp_path: Path, number: str):
    line = f'{{"prompt": "a", "id": {{"of": [{number}]}}}}'
    answers(tiny_bundle, tmp_path, line, {"prompt": "a", "id": 7})
    first, second = (
        json.loads(line, parse_constant=sys.exit)  # which fails on NaN and Infinity
        for line in (tmp_path / "out.jsonl").read_text().splitlines()
    )
    assert "JSON" in first["error"] and "id" not in first
    assert second["id"] == 7 and len(second["token_ids"]) == 6


def test_messages_have_the_roles_that_the_server_accepts(tiny_bundle: Path, tmp_path: Path):
    lines = [
        {"messages": [{"role": role, "content": "fox"}]}
        for role in ("pirate", "tool", "developer", "system")
    ]
    pirate, tool, developer, system = answers(tiny_bundle, tmp_path, *lines)
    assert "messages.0.role" in pirate["error"] and "'developer'" in tool["error"]
    assert developer["prompt_ids"] == system["prompt_ids"]


def test_only_line_feeds_end_lines(tmp_path: Path):
    """JSON may hold U+2028, U+2029 and U+0085 unescaped; str.splitlines would split there."""
    path = tmp_path / "in.jsonl"
    texts = ["a\u2028b", "c\u2029d\u0085e", "f\x0c"]
    path.write_text(
        "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts),
        newline="",
    )
    assert [line.object()["prompt"] for line in read_lines(path)] == texts
