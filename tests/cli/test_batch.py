"""pass-run batch: every line gets a result, in order, even if requests or sessions fail."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys

import pytest
from pass_run import PASS_RUN, Batch, assert_refused, output, process, refusal, write_jsonl
from replacing import export_again

from pass_runtime import GenerateOptions, load
from pass_runtime.cli.prompt_io import read_lines
from pass_runtime.decode.engine import Engine
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.session import Session

FLAGS = ("--max-new-tokens", "6", "--ignore-eos")
OPTIONS = GenerateOptions(6, ignore_eos=True)
POISON = "poison"
"""The prompt that some tests make fail."""
PROMPTS = [f"number {i}" for i in range(12)]


@pytest.fixture
def batch(tiny_bundle, tmp_path):
    return Batch(tiny_bundle, tmp_path, *FLAGS)


@pytest.fixture
def session(tiny_bundle):
    with load(tiny_bundle, "cpu", threads=1) as session:
        yield session


def test_every_line_is_answered_in_order(batch, session):
    prompts = [f"{i} " * (1 + 7 * i % 5) for i in range(9)]
    requests = [{"prompt": prompt, "id": f"r{i}"} for i, prompt in enumerate(prompts)]
    results = batch.answers(*requests)
    assert [result["line"] for result in results] == list(range(1, 10))
    assert [result["id"] for result in results] == [f"r{i}" for i in range(9)]
    for prompt, result in zip(prompts, results, strict=True):
        alone = session.generate(prompt, OPTIONS).result()
        assert (result["text"], result["token_ids"]) == (alone.text, alone.token_ids)
        assert result["finish_reason"] == "length" and result["stats"]["generated_tokens"] == 6


def test_a_line_overrides_the_flags(batch, session):
    messages = [{"role": "user", "content": "fox"}]
    first, short, chat, chosen, last = batch.answers(
        {"prompt": "fox"},
        {"prompt": "fox", "max_new_tokens": 3, "plan": "two-pass", "lookahead": 2, "draft": "both"},
        {"messages": messages},
        {"prompt": "fox", "ignore_eos": False, "choice": ["left", "right"]},
        {"prompt": "fox"},
    )
    assert first["token_ids"] == last["token_ids"]  # a line does not change later ones
    assert short["token_ids"] == first["token_ids"][:3]
    assert (short["stats"]["plan"], short["stats"]["lookahead"]) == ("two-pass+ngram", 2)
    assert chosen["text"] in ("left", "right")
    assert chat["token_ids"] == session.chat(messages, OPTIONS).result().token_ids


def test_characters_may_be_escaped(batch, session):
    text = "caf\u00e9 \ufffd@"  # json.dumps escapes the two characters that are not ASCII
    (result,) = batch.answers({"prompt": text, "id": text})
    assert (result["id"], result["prompt_ids"]) == (text, session.encode(text))


BAD_LINES = {
    "not JSON": "hello",
    "no object": "[1]",
    "no prompt": "{}",
    "no messages": '{"messages": []}',
    "deeper than any request": "[" * 100_000,
    "both": '{"prompt": "a", "messages": []}',
    "unknown key": '{"prompt": "a", "max_tokens": 5}',
    "prompt not text": '{"prompt": 5}',
    "half a character": '{"prompt": "\\ud83e"}',
    "messages not a list": '{"messages": "a"}',
    "message without content": '{"messages": [{"role": "user"}]}',
    "too long": json.dumps({"prompt": "12 " * 800}),
    "lookahead too large": '{"prompt": "a", "plan": "two-pass", "lookahead": 7}',
    "temperature NaN": '{"prompt": "a", "temperature": NaN}',
    "max_new_tokens a truth value": '{"prompt": "a", "max_new_tokens": true}',
    "stop a number": '{"prompt": "a", "stop": 5}',
    "ignore_eos not a boolean": '{"prompt": "a", "ignore_eos": "no"}',
    "no token id": '{"prompt": "a", "logit_bias": {"fox": 100}}',
    "wrong regex": '{"prompt": "a", "ignore_eos": false, "regex": "("}',
    "two constraints": '{"prompt": "a", "ignore_eos": false, "regex": "x", "choice": ["y"]}',
    **{
        f"id {number[:5]}": f'{{"prompt": "a", "id": {{"of": [{number}]}}}}'
        for number in ("1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 5000)
    },
}


def test_a_bad_line_gets_an_error_and_the_next_line_an_answer(batch):
    batch.requests.write_text(
        "".join(f'{line}\n{{"prompt": "a"}}\n' for line in BAD_LINES.values())
    )
    count, report = len(BAD_LINES), batch.run()
    assert f"{2 * count} results" in report and f"{count} failed" in report
    written = [
        json.loads(line, parse_constant=sys.exit)  # which fails on NaN and Infinity
        for line in batch.results.read_text().splitlines()
    ]
    assert [result["line"] for result in written] == list(range(1, 2 * count + 1))
    for case, bad, good in zip(BAD_LINES, written[::2], written[1::2], strict=True):
        assert bad.get("error") and "\n" not in bad["error"] and "text" not in bad, case
        assert "JSON" in bad["error"] or "id " not in case
        assert len(good["token_ids"]) == 6, case


def test_the_result_of_a_bad_line_keeps_its_id(batch):
    ids = ["a", 2, {"of": "any kind"}, None]
    wrong = ({"prompt": 5}, {"prompt": "x", "temperature": -1}, {"prompt": "x", "speed": 1}, {})
    results = batch.answers(*({"id": id} | line for id, line in zip(ids, wrong, strict=True)), {})
    assert [result["id"] for result in results[:4]] == ids
    assert all("error" in result for result in results) and "id" not in results[4]


def test_messages_have_the_roles_that_the_server_accepts(batch):
    roles = ("pirate", "tool", "developer", "system")
    lines = [{"messages": [{"role": role, "content": "fox"}]} for role in roles]
    pirate, tool, developer, system = batch.answers(*lines)
    assert "messages.0.role" in pirate["error"] and "'developer'" in tool["error"]
    assert developer["prompt_ids"] == system["prompt_ids"]


def test_blank_lines_count_in_line_numbers_and_seeds(random_bundle, tmp_path):
    flags = ("--temperature", "1", "--seed")
    batch = Batch(random_bundle, tmp_path, *FLAGS)
    second, fifth = batch.answers(
        "", {"prompt": "a"}, "", "  ", {"prompt": "a"}, flags=(*flags, "10")
    )
    assert (second["line"], second["seed"]) == (2, 11) and (fifth["line"], fifth["seed"]) == (5, 14)
    line = ("-p", "a", "--json", *FLAGS, *flags, "14")
    alone = json.loads(output("generate", random_bundle, *line))
    assert fifth["stats"].keys() == alone.pop("stats").keys()  # the times differ
    assert {key: fifth[key] for key in alone} == alone
    assert alone["seed"] == 14 and alone["prompt_ids"] and alone["finish_reason"] == "length"


def test_a_byte_order_mark_and_a_missing_last_line_feed(batch):
    batch.requests.write_text('{"prompt": "a"}\n{"prompt": "b"}', encoding="utf-8-sig")
    batch.run()
    assert [bool(result["text"]) for result in batch.written()] == [True, True]


def test_only_line_feeds_end_lines(tmp_path):
    """JSON may hold U+2028, U+2029 and U+0085 unescaped; str.splitlines would split there."""
    path = tmp_path / "in.jsonl"
    texts = ["a\u2028b", "c\u2029d\u0085e", "f\x0c"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_text("".join(f"{line}\r\n" for line in lines), newline="")
    assert [line.object()["prompt"] for line in read_lines(path)] == texts


@pytest.mark.slow
def test_requests_and_results_can_be_standard_input_and_output(batch):
    stdin = '{"prompt": "a", "id": 1}\nno JSON\n'
    done = process("batch", batch.bundle, "-", "-", *FLAGS, stdin=stdin)
    assert done.returncode == 0
    assert done.stderr == '2 results in standard output, 1 failed (see their "error")\n'
    good, bad = (json.loads(line) for line in done.stdout.splitlines())
    assert (good["line"], good["id"], bad["line"]) == (1, 1, 2) and "error" in bad
    first, second = (
        process("batch", batch.bundle, "-", batch.results, *FLAGS, stdin=stdin) for _ in range(2)
    )
    assert first.returncode == 0 and "continuing after line 2" in second.stderr


@pytest.mark.slow
def test_results_can_be_written_to_a_fifo_or_a_device(batch, tmp_path):
    """Earlier results are looked for in regular files only."""
    write_jsonl(batch.requests, {"prompt": "a"}, {"prompt": "b"})
    command, fifo = ("batch", batch.bundle, batch.requests), tmp_path / "fifo"
    os.mkfifo(fifo)
    line = [*PASS_RUN, *map(str, (*command, fifo, *FLAGS))]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as running:
        lines = fifo.read_text().splitlines()
        assert running.communicate(timeout=60)[1] == f"2 results in {fifo}\n"
    assert [json.loads(line)["line"] for line in lines] == [1, 2]
    assert len(process(*command, "/dev/stdout", *FLAGS).stdout.splitlines()) == 2
    line = refusal(*command, "/dev/full", *FLAGS)
    assert line == "error: cannot write /dev/full: No space left on device\n"
    assert "no regular file" in refusal(*command, "/dev/null", *FLAGS, "--retry-failed")


def test_fail_on_error_sets_the_exit_status(batch):
    write_jsonl(batch.requests, {"prompt": "a"}, {"prompt": 5})
    for _ in range(2):  # the second time, the failed result is already in the file
        assert "1 failed" in batch.run("--fail-on-error", status=1)
    batch.results.unlink()
    write_jsonl(batch.requests, {"prompt": "a"})
    batch.run("--fail-on-error")


def test_help_has_one_default_for_the_seed():
    """Other commands draw a random seed; batch has an option of its own in place of theirs."""
    text = " ".join(output("batch", "--help").split())
    assert text.count("seed + n - 1") == 1 and "[default: random]" not in text


def test_an_empty_file_has_no_results(batch):
    assert batch.answers() == []


def test_what_cannot_be_read_or_written_or_done_is_refused(batch, tmp_path):
    assert "in.jsonl" in batch.refusal()
    batch.requests.write_bytes(b'{"prompt": "\xff"}\n')
    assert "not UTF-8" in batch.refusal()
    write_jsonl(batch.requests, {"prompt": "a"})
    for flags in (("--plan", "warp"), ("--top-p", "1.5")):
        batch.refusal(*flags)
    assert not batch.results.exists()
    for results in (tmp_path / "no" / "out.jsonl", tmp_path):
        batch.results = results
        assert "cannot write" in batch.refusal()


@pytest.mark.slow
def test_a_full_disk_leaves_whole_lines_that_a_later_run_continues(batch):
    write_jsonl(batch.requests, *({"prompt": f"{i}"} for i in range(40)))
    done = subprocess.run(
        [*PASS_RUN, *map(str, batch.command())],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
    )
    assert "out.jsonl" in assert_refused(done.returncode, done.stdout, done.stderr)
    batch.run()
    assert [result["line"] for result in batch.written()] == list(range(1, 41))


def test_prompts_as_long_as_the_capacity_fail_no_other_line(batch, session):
    full = next(text for n in range(33) if len(session.encode(text := "~" * n)) == 32)
    prompts = [full if i in (3, 7) else f"{i}" for i in range(12)]  # 32 is the KV capacity
    flags = ("--capacity", "32", "--max-batch-size", "8")
    written = batch.answers(*({"prompt": prompt} for prompt in prompts), flags=flags)
    assert [result["line"] for result in written] == list(range(1, 13))
    for result, prompt in zip(written, prompts, strict=True):
        assert prompt is full or len(result["token_ids"]) == 6
    assert "12 results" in batch.run(*flags)  # nothing is left to do


@pytest.mark.slow
def test_a_batch_with_many_slots_does_not_overfill_the_queue(tiny_bundle, tmp_path):
    flags = "--max-new-tokens 1 --ignore-eos --plan ar --capacity 8 --max-batch-size 1024"
    batch = Batch(tiny_bundle, tmp_path, *shlex.split(flags))
    written = batch.answers(*({"prompt": "a"},) * 2100)
    assert len(written) == 2100 and not any("error" in result for result in written)


@pytest.fixture
def poisoned(batch):
    """A batch of PROMPTS, and of POISON after the fifth."""
    prompts = [*PROMPTS[:5], POISON, *PROMPTS[5:]]
    write_jsonl(batch.requests, *({"prompt": prompt, "id": prompt} for prompt in prompts))
    return batch


@pytest.fixture
def poison_ids(session):
    return tuple(session.encode(POISON))


def fail_encoding(patch, _):
    encode = Session.encode

    def failing(session, text):
        if text == POISON:
            raise ValueError("no\ntwo")
        return encode(session, text)

    patch.setattr(Session, "encode", failing)


def fail_writing(patch, poison_ids):
    write = SequenceState.write

    def failing(sequence, *args):
        if sequence.request.prompt_ids == poison_ids:
            raise ValueError("no\ntwo")
        write(sequence, *args)

    patch.setattr(SequenceState, "write", failing)


def fail_sessions(patch, poison_ids):
    """Make the session fail at a step with this prompt."""
    step = Engine.step

    def failing(engine):
        sequences = [*engine.waiting, *(slot.sequence for slot in engine.slots)]
        if any(each.request.prompt_ids == poison_ids for each in sequences if each is not None):
            raise ValueError("no\ntwo")
        step(engine)

    patch.setattr(Engine, "step", failing)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("fail", "slots"),
    [(fail_encoding, 2), (fail_writing, 2), (fail_sessions, 1), (fail_sessions, 4)],
)
def test_a_request_that_fails_fails_no_other(poisoned, poison_ids, monkeypatch, fail, slots):
    with monkeypatch.context() as patched:
        fail(patched, poison_ids)
        assert "1 failed" in poisoned.run("--max-batch-size", slots, status=1)
    answered = [result for result in poisoned.written() if "error" not in result]
    assert [result["id"] for result in answered] == PROMPTS
    assert all(len(result["token_ids"]) == 6 for result in answered)
    (failed,) = [result for result in poisoned.written() if "error" in result]
    assert (failed["error"], failed["unexpected"]) == ("ValueError: no two", True)
    poisoned.run(status=1)  # the failed line is not done again
    poisoned.run("--retry-failed")
    assert not any("error" in result for result in poisoned.written())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_sessions_that_fail_one_after_another_end_the_run(batch, poison_ids, monkeypatch):
    prompts = ["a", *[POISON] * 8, "b"]
    write_jsonl(batch.requests, *({"prompt": prompt} for prompt in prompts))
    with monkeypatch.context() as patched:
        fail_sessions(patched, poison_ids)
        line = batch.refusal("--max-batch-size", "1")
    assert "failed 3 times in a row, the last time at line 4: ValueError: no two" in line
    assert "run again" in line
    assert ["error" in result for result in batch.written()] == [False, True, True]
    batch.run("--retry-failed")
    assert ["error" in result for result in batch.written()] == [False] * 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_run_mixes_the_texts_of_two_bundles(
    poisoned, tiny_bundle, random_bundle, poison_ids, monkeypatch
):
    """A session fails after its bundle was exported again."""
    poisoned.bundle = bundle = poisoned.requests.with_name("bundle")
    shutil.copytree(tiny_bundle, bundle)
    one_slot, close = ("--max-batch-size", "1"), Session.close
    with monkeypatch.context() as patched:
        fail_sessions(patched, poison_ids)
        patched.setattr(
            Session, "close", lambda each: (close(each), export_again(bundle, random_bundle))
        )
        assert f"{bundle} has changed since this run began" in poisoned.refusal(*one_slot)
    written = [result["id"] for result in poisoned.written()]
    assert written == PROMPTS[: len(written)]
    assert "or of another bundle" in poisoned.refusal(*one_slot)
    export_again(bundle, tiny_bundle)
    poisoned.run(*one_slot)
    assert len(poisoned.written()) == len(PROMPTS) + 1
