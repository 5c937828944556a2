"""pass-run batch: every line gets a result, in order, even if it fails."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
from pass_run import (
    PASS_RUN,
    assert_refused,
    output,
    pass_run,
    process,
    read_jsonl,
    refusal,
    write_jsonl,
)

from pass_runtime import GenerateOptions, load

FLAGS = ("--max-new-tokens", "6", "--ignore-eos")


def answers(
    bundle: Path, tmp_path: Path, *lines: object, flags: tuple[str, ...] = ()
) -> list[dict]:
    """Run a batch of these lines, texts as they are and others as JSON. Return its results."""
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    requests.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    output("batch", bundle, requests, results, *FLAGS, *flags)
    return read_jsonl(results)


def test_every_line_is_answered_in_order(tiny_bundle: Path, tmp_path: Path):
    prompts = [f"{i} " * (1 + 7 * i % 5) for i in range(9)]
    requests = [{"prompt": prompt, "id": f"r{i}"} for i, prompt in enumerate(prompts)]
    results = answers(tiny_bundle, tmp_path, *requests)
    assert [result["line"] for result in results] == list(range(1, 10))
    assert [result["id"] for result in results] == [f"r{i}" for i in range(9)]
    session, options = load(tiny_bundle, "cpu", threads=1), GenerateOptions(6, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        alone = session.generate(prompt, options).result()
        assert (result["text"], result["token_ids"]) == (alone.text, alone.token_ids)
        assert result["finish_reason"] == "length" and result["stats"]["generated_tokens"] == 6


def test_a_line_overrides_the_flags(random_bundle: Path, tmp_path: Path):
    sampled = {"prompt": "fox", "temperature": 1, "top_k": 50, "top_p": 0.9, "max_new_tokens": 20}
    messages = [{"role": "user", "content": "fox"}]
    results = answers(
        random_bundle,
        tmp_path,
        {"prompt": "fox"},
        {"prompt": "fox", "max_new_tokens": 3, "plan": "two-pass", "lookahead": 2, "draft": "both"},
        sampled | {"seed": 1},
        sampled | {"seed": 2},
        {"messages": messages},
        {"prompt": "fox", "ignore_eos": False, "choice": ["left", "right"]},
        {"prompt": "fox"},
    )
    first, short, seed_1, seed_2, chat, _, last = (each["token_ids"] for each in results)
    assert first == last and len(first) == 6  # a line does not change later ones
    assert short == first[:3] and results[1]["stats"]["lookahead"] == 2
    assert (
        results[1]["stats"]["plan"] == "two-pass+ngram" and len(seed_1) == 20 and seed_2 != seed_1
    )
    assert results[5]["text"] in ("left", "right")
    session, options = load(random_bundle, "cpu", threads=1), GenerateOptions(6, ignore_eos=True)
    assert chat == session.chat(messages, options).result().token_ids


def test_characters_may_be_escaped(tiny_bundle: Path, tmp_path: Path):
    text = "caf\u00e9 \ufffd@"  # json.dumps escapes the two characters that are not ASCII
    (result,) = answers(tiny_bundle, tmp_path, {"prompt": text, "id": text})
    assert result["id"] == text
    assert result["prompt_ids"] == load(tiny_bundle, "cpu", threads=1).encode(text)


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
}


def test_a_bad_line_gets_an_error_and_the_next_line_an_answer(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(
        "".join(line + '\n{"prompt": "a"}\n' for line in BAD_LINES.values()), encoding="utf-8"
    )
    done = pass_run("batch", tiny_bundle, requests, results, *FLAGS)
    count = len(BAD_LINES)
    assert done.exit_code == 0
    assert f"{2 * count} results" in done.stderr and f"{count} failed" in done.stderr
    written = read_jsonl(results)
    assert [result["line"] for result in written] == list(range(1, 2 * count + 1))
    for case, bad, good in zip(BAD_LINES, written[::2], written[1::2], strict=True):
        assert bad.get("error") and "\n" not in bad["error"] and "text" not in bad, case
        assert len(good["token_ids"]) == 6, case


def test_blank_lines_count_in_line_numbers_and_seeds(random_bundle: Path, tmp_path: Path):
    lines, flags = (
        ("", {"prompt": "a"}, "", "  ", {"prompt": "a"}),
        ("--temperature", "1", "--seed"),
    )
    second, fifth = answers(random_bundle, tmp_path, *lines, flags=(*flags, "10"))
    assert (second["line"], second["seed"]) == (2, 11) and (fifth["line"], fifth["seed"]) == (5, 14)
    line = ("-p", "a", "--json", *FLAGS, *flags, "14")
    alone = json.loads(output("generate", random_bundle, *line))
    assert fifth["stats"].keys() == alone.pop("stats").keys()  # the times differ
    assert {key: fifth[key] for key in alone} == alone
    assert alone["seed"] == 14 and alone["prompt_ids"] and alone["finish_reason"] == "length"


def test_the_result_of_a_bad_line_keeps_its_id(tiny_bundle: Path, tmp_path: Path):
    wrong = [
        {"id": "a", "prompt": 5},
        {"id": 2, "prompt": "x", "temperature": -1},
        {"id": {"of": "any kind"}, "prompt": "x", "speed": "warp"},
        {"id": None},
    ]
    results = answers(tiny_bundle, tmp_path, *wrong, {"prompt": "x"})
    assert [result["id"] for result in results[:4]] == ["a", 2, {"of": "any kind"}, None]
    assert all("error" in result for result in results[:4]) and "id" not in results[4]


def test_a_byte_order_mark_and_a_missing_last_line_feed(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text('{"prompt": "a"}\n{"prompt": "b"}', encoding="utf-8-sig")
    output("batch", tiny_bundle, requests, results, *FLAGS)
    assert all(result["text"] for result in read_jsonl(results))
    assert len(read_jsonl(results)) == 2


@pytest.mark.slow
def test_requests_and_results_can_be_standard_input_and_output(tiny_bundle: Path, tmp_path: Path):
    stdin = '{"prompt": "a", "id": 1}\nno JSON\n'
    done = process("batch", tiny_bundle, "-", "-", *FLAGS, stdin=stdin)
    assert done.returncode == 0
    assert done.stderr == '2 results in standard output, 1 failed (see their "error")\n'
    good, bad = (json.loads(line) for line in done.stdout.splitlines())
    assert (good["line"], good["id"], bad["line"]) == (1, 1, 2) and "error" in bad
    results = tmp_path / "out.jsonl"
    first, second = (
        process("batch", tiny_bundle, "-", results, *FLAGS, stdin=stdin) for _ in range(2)
    )
    assert first.returncode == 0 and "continuing after line 2" in second.stderr


@pytest.mark.slow
def test_results_can_be_written_to_a_fifo_or_a_device(tiny_bundle: Path, tmp_path: Path):
    """Earlier results are looked for in regular files only."""
    requests = write_jsonl(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [*PASS_RUN, "batch", str(tiny_bundle), str(requests), str(fifo), *FLAGS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        lines = fifo.read_text().splitlines()
        assert running.communicate(timeout=60)[1] == f"2 results in {fifo}\n"
    assert [json.loads(line)["line"] for line in lines] == [1, 2]
    done = process("batch", tiny_bundle, requests, "/dev/stdout", *FLAGS)
    assert len(done.stdout.splitlines()) == 2
    line = refusal("batch", tiny_bundle, requests, "/dev/full", *FLAGS)
    assert line == "error: cannot write /dev/full: No space left on device\n"
    line = refusal("batch", tiny_bundle, requests, "/dev/null", *FLAGS, "--retry-failed")
    assert "no regular file" in line


def test_fail_on_error_sets_the_exit_status(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    command = ("batch", tiny_bundle, requests, results, *FLAGS, "--fail-on-error")
    write_jsonl(requests, {"prompt": "a"}, {"prompt": 5})
    for _ in range(2):  # the second time, the failed result is already in the file
        done = pass_run(*command)
        assert done.exit_code == 1 and "1 failed" in done.stderr
    write_jsonl(requests, {"prompt": "a"})
    results.unlink()
    assert pass_run(*command).exit_code == 0


def test_help_has_one_default_for_the_seed():
    """Other commands draw a random seed; batch has an option of its own in place of theirs."""
    text = " ".join(output("batch", "--help").split())
    assert text.count("seed + n - 1") == 1 and "[default: random]" not in text


def test_an_empty_file_has_no_results(tiny_bundle: Path, tmp_path: Path):
    assert answers(tiny_bundle, tmp_path) == []


def test_unreadable_requests_and_unwritable_results_are_refused(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert "in.jsonl" in refusal("batch", tiny_bundle, requests, results)
    requests.write_bytes(b'{"prompt": "\xff"}\n')
    assert "not UTF-8" in refusal("batch", tiny_bundle, requests, results)
    assert not results.exists()
    write_jsonl(requests, {"prompt": "a"})
    assert "cannot write" in refusal("batch", tiny_bundle, requests, tmp_path / "no" / "out.jsonl")
    assert "cannot write" in refusal("batch", tiny_bundle, requests, tmp_path)


@pytest.mark.parametrize("flags", [["--plan", "warp"], ["--top-p", "1.5"]], ids=" ".join)
def test_refused_flags_write_no_results(tiny_bundle: Path, tmp_path: Path, flags: list[str]):
    requests = write_jsonl(tmp_path / "in.jsonl", {"prompt": "a"})
    refusal("batch", tiny_bundle, requests, tmp_path / "out.jsonl", *flags)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.slow
def test_a_full_disk_leaves_whole_lines_that_a_later_run_continues(
    tiny_bundle: Path, tmp_path: Path
):
    requests = write_jsonl(tmp_path / "in.jsonl", *({"prompt": f"{i}"} for i in range(40)))
    results = tmp_path / "out.jsonl"
    done = subprocess.run(
        [*PASS_RUN, "batch", str(tiny_bundle), str(requests), str(results), *FLAGS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
    )
    assert "out.jsonl" in assert_refused(done.returncode, done.stdout, done.stderr)
    output("batch", tiny_bundle, requests, results, *FLAGS)
    assert [result["line"] for result in read_jsonl(results)] == list(range(1, 41))
