"""pass-run batch: a result for every line, in order, failures included."""

from __future__ import annotations

import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
from pass_run import PASS_RUN, assert_refused, output, pass_run, process, refusal

from pass_runtime import GenerateOptions, load

FLAGS = ("--max-new-tokens", "6", "--ignore-eos")


def write(path: Path, *requests: object) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    return path


def answers(
    bundle: Path, tmp_path: Path, *requests: object, flags: tuple[str, ...] = FLAGS
) -> list[dict]:
    results = tmp_path / "out.jsonl"
    output("batch", bundle, write(tmp_path / "in.jsonl", *requests), results, *flags)
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def test_every_line_is_answered_in_order(tiny_bundle: Path, tmp_path: Path):
    prompts = [f"{i} " * (1 + 7 * i % 5) for i in range(9)]
    results = answers(
        tiny_bundle, tmp_path, *({"prompt": p, "id": f"r{i}"} for i, p in enumerate(prompts))
    )
    assert [result["line"] for result in results] == list(range(1, 10))
    assert [result["id"] for result in results] == [f"r{i}" for i in range(9)]
    session = load(tiny_bundle, "cpu", threads=1)
    for prompt, result in zip(prompts, results, strict=True):
        alone = session.generate(
            prompt, GenerateOptions(max_new_tokens=6, ignore_eos=True)
        ).result()
        assert (result["text"], result["token_ids"]) == (alone.text, alone.token_ids)
        assert result["finish_reason"] == "length" and result["stats"]["generated_tokens"] == 6


def test_a_line_overrides_the_flags(random_bundle: Path, tmp_path: Path):
    hot = {"prompt": "fox", "temperature": 1, "top_k": 50, "top_p": 0.9, "max_new_tokens": 20}
    results = answers(
        random_bundle,
        tmp_path,
        {"prompt": "fox"},
        {"prompt": "fox", "max_new_tokens": 3, "plan": "two-pass", "lookahead": 2, "draft": "both"},
        hot | {"seed": 1, "plan": "ar"},
        hot | {"seed": 1, "plan": "two-pass"},
        hot | {"seed": 2},
        {"messages": [{"role": "user", "content": "fox"}]},
        {"prompt": "fox"},
    )
    plain, short, seed1, fast1, seed2, chat, again = (result["token_ids"] for result in results)
    assert plain == again and len(plain) == 6  # an override ends with its line
    assert short == plain[:3] and results[1]["stats"]["lookahead"] == 2
    assert seed1 == fast1 and len(seed1) == 20 and results[3]["stats"]["plan"] == "two-pass"
    assert seed2 != seed1
    assert (
        chat
        == load(random_bundle, "cpu", threads=1)
        .chat(
            [{"role": "user", "content": "fox"}], GenerateOptions(max_new_tokens=6, ignore_eos=True)
        )
        .result()
        .token_ids
    )


def test_characters_may_be_escaped(tiny_bundle: Path, tmp_path: Path):
    """As `json.dumps` writes them."""
    text = "caf\u00e9 \ufffd@"
    (found,) = answers(tiny_bundle, tmp_path, {"prompt": text, "id": text})
    assert found["id"] == text
    assert found["prompt_ids"] == load(tiny_bundle, "cpu", threads=1).encode(text)


def test_lines_of_one_salt_share_their_prompt(tiny_bundle: Path, tmp_path: Path):
    line = {"prompt": "The quick brown fox jumps over the lazy dog. " * 3, "max_new_tokens": 1}
    found = answers(
        tiny_bundle, tmp_path, *({**line, "cache_salt": salt} for salt in ("a", "b", "a"))
    )
    first, second, third = (each["stats"]["cached_tokens"] for each in found)
    assert first == second == 0 < third


def test_stop_and_eos_overrides(tiny_bundle: Path, tmp_path: Path):
    text = answers(tiny_bundle, tmp_path, {"prompt": "fox", "max_new_tokens": 20})[0]["text"]
    (tmp_path / "out.jsonl").unlink()
    stop = text[4:6]
    one, several = answers(
        tiny_bundle,
        tmp_path,
        {"prompt": "fox", "max_new_tokens": 20, "stop": stop},
        {"prompt": "fox", "max_new_tokens": 20, "stop": ["no such text", stop]},
    )
    assert one["text"] == several["text"] == text[: text.index(stop)]
    assert one["finish_reason"] == "stop"


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
    "unknown plan": '{"prompt": "a", "plan": "warp"}',
    "negative temperature": '{"prompt": "a", "temperature": -1}',
    "temperature not a number": '{"prompt": "a", "temperature": "hot"}',
    "temperature NaN": '{"prompt": "a", "temperature": NaN}',
    "top_k not whole": '{"prompt": "a", "temperature": 1, "top_k": 1.5}',
    "seed not whole": '{"prompt": "a", "temperature": 1, "seed": 1.5}',
    "max_new_tokens not whole": '{"prompt": "a", "max_new_tokens": 2.5}',
    "max_new_tokens a truth value": '{"prompt": "a", "max_new_tokens": true}',
    "lookahead not a number": '{"prompt": "a", "plan": "two-pass", "lookahead": "3"}',
    "stop a number": '{"prompt": "a", "stop": 5}',
    "stop of numbers": '{"prompt": "a", "stop": [5]}',
    "plan a list": '{"prompt": "a", "plan": ["ar"]}',
    "ignore_eos not a boolean": '{"prompt": "a", "ignore_eos": "no"}',
}


def test_a_bad_line_is_recorded_and_the_next_one_answered(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(
        "".join(line + '\n{"prompt": "a"}\n' for line in BAD_LINES.values()), encoding="utf-8"
    )
    done = pass_run("batch", tiny_bundle, requests, results, *FLAGS)
    count = len(BAD_LINES)
    assert done.exit_code == 0
    assert f"{2 * count} results" in done.stderr and f"{count} failed" in done.stderr
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [each["line"] for each in found] == list(range(1, 2 * count + 1))
    for case, bad, good in zip(BAD_LINES, found[::2], found[1::2], strict=True):
        assert bad.get("error") and "\n" not in bad["error"] and "text" not in bad, case
        assert len(good["token_ids"]) == 6, case


def test_a_line_is_the_files_own(random_bundle: Path, tmp_path: Path):
    """Blank lines count, for "line" and for the seed."""
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text('\n{"prompt": "a"}\n\n  \n{"prompt": "a"}\n')
    output("batch", random_bundle, requests, results, *FLAGS, "--temperature", "1", "--seed", "10")
    second, fifth = (json.loads(line) for line in results.read_text().splitlines())
    assert (second["line"], second["seed"]) == (2, 11) and (fifth["line"], fifth["seed"]) == (5, 14)
    flags = ("-p", "a", "--json", *FLAGS, "--temperature", "1", "--seed", "14")
    alone = json.loads(output("generate", random_bundle, *flags))
    assert {key: fifth[key] for key in alone if key != "stats"} == {
        k: v for k, v in alone.items() if k != "stats"
    }
    assert alone["seed"] == 14 and alone["prompt_ids"] and alone["finish_reason"] == "length"
    assert fifth["stats"].keys() == alone["stats"].keys()


def test_an_id_survives_what_is_wrong_with_its_line(tiny_bundle: Path, tmp_path: Path):
    wrong = [
        {"id": "a", "prompt": 5},
        {"id": 2, "prompt": "x", "temperature": -1},
        {"id": {"of": "any kind"}, "prompt": "x", "speed": "warp"},
        {"id": None},
    ]
    results = answers(tiny_bundle, tmp_path, *wrong, {"prompt": "x"})
    assert [result["id"] for result in results[:4]] == ["a", 2, {"of": "any kind"}, None]
    assert all("error" in result for result in results[:4]) and "id" not in results[4]


def test_a_byte_order_mark(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    output("batch", tiny_bundle, requests, results, *FLAGS)
    assert json.loads(results.read_text())["text"]


def test_standard_input_and_output(tiny_bundle: Path, tmp_path: Path):
    stdin = '{"prompt": "a", "id": 1}\nno JSON\n'
    done = process("batch", tiny_bundle, "-", "-", *FLAGS, stdin=stdin)
    assert (
        done.returncode == 0
        and done.stderr == '2 results in standard output, 1 failed (see their "error")\n'
    )
    good, bad = (json.loads(line) for line in done.stdout.splitlines())
    assert (good["line"], good["id"], bad["line"]) == (1, 1, 2) and "error" in bad
    results = tmp_path / "out.jsonl"
    assert process("batch", tiny_bundle, "-", results, *FLAGS, stdin=stdin).returncode == 0
    assert (
        "continuing after line 2"
        in process("batch", tiny_bundle, "-", results, *FLAGS, stdin=stdin).stderr
    )


def test_a_fifo_and_a_device(tiny_bundle: Path, tmp_path: Path):
    """Neither is read for earlier results."""
    requests = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"})
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [*PASS_RUN, "batch", str(tiny_bundle), str(requests), str(fifo), *FLAGS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        lines = fifo.read_text().splitlines()
        assert running.communicate(timeout=60)[1] == f"2 results in {fifo}\n"
    assert [json.loads(line)["line"] for line in lines] == [1, 2]
    done = process("batch", tiny_bundle, requests, "/dev/stdout", *FLAGS)
    assert len(done.stdout.splitlines()) == 2
    assert refusal("batch", tiny_bundle, requests, "/dev/full", *FLAGS) == (
        "error: cannot write /dev/full: No space left on device\n"
    )
    assert "no regular file" in refusal(
        "batch", tiny_bundle, requests, "/dev/null", *FLAGS, "--retry-failed"
    )


def test_standard_output_on_a_full_disk(tiny_bundle: Path, tmp_path: Path):
    requests = write(tmp_path / "in.jsonl", {"prompt": "a"})
    command = [*PASS_RUN, "batch", str(tiny_bundle), str(requests), "-", *FLAGS]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


def test_fail_on_error(tiny_bundle: Path, tmp_path: Path):
    requests, results = (
        write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": 5}),
        tmp_path / "out.jsonl",
    )
    for _ in range(2):  # the second time from the results that are there
        done = pass_run("batch", tiny_bundle, requests, results, *FLAGS, "--fail-on-error")
        assert done.exit_code == 1 and "1 failed" in done.stderr
    write(requests, {"prompt": "a"})
    results.unlink()
    assert (
        pass_run("batch", tiny_bundle, requests, results, *FLAGS, "--fail-on-error").exit_code == 0
    )


def test_help_has_one_default_for_the_seed(tiny_bundle: Path):
    text = " ".join(output("batch", "--help").split())
    assert text.count("seed + n - 1") == 1 and "[default: random]" not in text


def test_blank_lines_are_skipped_and_an_empty_file_is_no_error(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text('\n{"prompt": "a"}\n   \n{"prompt": "b"}')
    output("batch", tiny_bundle, requests, results, *FLAGS)
    assert len(results.read_text().splitlines()) == 2
    requests.write_text("")
    output("batch", tiny_bundle, requests, tmp_path / "empty.jsonl", *FLAGS)
    assert (tmp_path / "empty.jsonl").read_bytes() == b""


def test_unreadable_requests_and_unwritable_results(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert "in.jsonl" in refusal("batch", tiny_bundle, requests, results)
    requests.write_bytes(b'{"prompt": "\xff"}\n')
    assert "not UTF-8" in refusal("batch", tiny_bundle, requests, results)
    assert not results.exists()
    write(requests, {"prompt": "a"})
    assert "cannot write" in refusal("batch", tiny_bundle, requests, tmp_path / "no" / "out.jsonl")
    assert "cannot write" in refusal("batch", tiny_bundle, requests, tmp_path)


@pytest.mark.parametrize("flags", [["--plan", "warp"], ["--top-p", "0"]], ids=" ".join)
def test_refused_flags(tiny_bundle: Path, tmp_path: Path, flags: list[str]):
    refusal(
        "batch",
        tiny_bundle,
        write(tmp_path / "in.jsonl", {"prompt": "a"}),
        tmp_path / "out.jsonl",
        *flags,
    )
    assert not (tmp_path / "out.jsonl").exists()


def test_a_full_disk(tiny_bundle: Path, tmp_path: Path):
    """One line on stderr, and whole lines in the file, as far as it got."""
    requests = write(tmp_path / "in.jsonl", *({"prompt": f"{i}"} for i in range(40)))
    results = tmp_path / "out.jsonl"
    done = subprocess.run(
        [*PASS_RUN, "batch", str(tiny_bundle), str(requests), str(results), *FLAGS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
    )
    line = assert_refused(done.returncode, done.stdout, done.stderr)
    assert "out.jsonl" in line
    output("batch", tiny_bundle, requests, results, *FLAGS)
    assert [json.loads(line)["line"] for line in results.read_text().splitlines()] == list(
        range(1, 41)
    )
