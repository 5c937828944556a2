"""pass-run generate: what it prints, where prompts come from, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from pass_run import PASS_RUN, assert_refused, bundle_copy, output, process, refusal

PROMPT = "The quick brown fox"
STATS = {"plan", "passes", "mean_acceptance_length", "acceptance_per_position"}
STATS |= {"prefill_seconds", "decode_seconds", "decode_tokens_per_second"}


def generated(bundle: Path, *arguments: object, stdin: str | bytes = "") -> dict:
    """Return the JSON that `generate --json --ignore-eos` prints."""
    return json.loads(output("generate", bundle, "--json", "--ignore-eos", *arguments, stdin=stdin))


def test_json_has_the_documented_keys(tiny_bundle: Path):
    answer = generated(tiny_bundle, "-p", PROMPT, "--max-new-tokens", 9, "--plan", "two-pass")
    assert {"prompt_ids", "token_ids", "text", "finish_reason", "stats"} <= answer.keys()
    assert answer["stats"].keys() >= STATS
    assert len(answer["token_ids"]) == answer["stats"]["generated_tokens"] == 9
    assert answer["finish_reason"] == "length"
    assert answer["stats"]["plan"] == "two-pass"
    assert len(answer["stats"]["acceptance_per_position"]) == answer["stats"]["lookahead"] == 6
    assert 1 <= answer["stats"]["mean_acceptance_length"] <= 7
    assert answer["stats"]["prefill_seconds"] > 0 and answer["stats"]["decode_seconds"] > 0


@pytest.mark.slow
def test_generate_in_a_process_of_its_own(tiny_bundle: Path, tmp_path: Path):
    """As users run it; most other tests of this file run the command in the process of the test."""
    done = process("generate", tiny_bundle, "--json", "--max-new-tokens", 4, stdin=PROMPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["token_ids"]) <= 4
    done = process("generate", tmp_path, "--wrap")
    line = assert_refused(done.returncode, done.stdout, done.stderr)
    assert line.endswith("; see pass-run generate --help\n")


def test_printed_text_is_the_text_of_the_json(tiny_bundle: Path):
    text = output("generate", tiny_bundle, "-p", PROMPT, "--max-new-tokens", 20, "--ignore-eos")
    assert text == generated(tiny_bundle, "-p", PROMPT, "--max-new-tokens", 20)["text"] + "\n"


def test_a_prompt_is_the_same_from_every_source(tiny_bundle: Path, tmp_path: Path):
    prompt = "Über naïve 🦊\nsecond line"
    file = tmp_path / "prompt.txt"
    file.write_text(prompt, encoding="utf-8")
    answers = [
        generated(tiny_bundle, "-p", prompt, "--max-new-tokens", 4),
        generated(tiny_bundle, "--prompt-file", file, "--max-new-tokens", 4),
        generated(tiny_bundle, "--max-new-tokens", 4, stdin=prompt),
    ]
    ids = [answer["prompt_ids"] for answer in answers]
    assert ids[0] == ids[1] == ids[2] and len(ids[0]) > 4
    assert answers[0]["text"] == answers[1]["text"] == answers[2]["text"]


@pytest.mark.slow
def test_a_files_last_line_feed_is_not_part_of_the_prompt(tiny_bundle: Path, tmp_path: Path):
    def ids(*arguments: object, stdin: str | bytes = "") -> list[int]:
        return generated(tiny_bundle, *arguments, "--max-new-tokens", 1, stdin=stdin)["prompt_ids"]

    file = tmp_path / "prompt.txt"
    alone = ids("-p", "fox\ndog")
    for ending in (b"", b"\n"):
        file.write_bytes(b"fox\ndog" + ending)
        assert ids("--prompt-file", file) == ids(stdin=file.read_bytes()) == alone
        assert ids("--prompt-file", "-", stdin=file.read_bytes()) == alone
    assert ids("--prompt-file", file, "--keep-newline") == ids("-p", "fox\ndog\n") != alone
    assert ids("--keep-newline", stdin="fox\ndog\n") == ids("-p", "fox\ndog\n")
    assert ids(stdin="fox\ndog\n\n") == ids("-p", "fox\ndog\n")  # only one line feed is cut
    assert ids(stdin=b"fox\r\n") == ids("-p", "fox")
    assert ids(stdin=b"\xef\xbb\xbffox") == ids("-p", "fox")  # a byte order mark


def test_an_empty_prompt_begins_at_the_start_token(tiny_bundle: Path, tmp_path: Path):
    file = tmp_path / "prompt.txt"
    one_token = ("--max-new-tokens", 1)
    assert generated(tiny_bundle, "-p", "", *one_token)["prompt_ids"] == [0]
    for content in ("", "\n"):
        file.write_text(content)
        assert generated(tiny_bundle, "--prompt-file", file, *one_token)["prompt_ids"] == [0]
        assert generated(tiny_bundle, *one_token, stdin=content)["prompt_ids"] == [0]


def test_a_closed_standard_input_is_refused(tiny_bundle: Path):
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *PASS_RUN, "generate", str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "standard input is closed" in assert_refused(done.returncode, done.stdout, done.stderr)


def test_every_plan_writes_the_same_text(random_bundle: Path):
    flags = ("-p", PROMPT, "--temperature", 1, "--seed", 5, "--max-new-tokens", 24)
    plain = generated(random_bundle, *flags, "--plan", "ar")
    fast = generated(random_bundle, *flags, "--plan", "two-pass", "--lookahead", 3)
    assert fast["stats"]["lookahead"] == 3
    assert fast["token_ids"] == plain["token_ids"]


def test_a_reported_seed_repeats_the_text(tiny_bundle: Path):
    flags = ("-p", PROMPT, "--temperature", 1, "--max-new-tokens", 24)
    first, second = generated(tiny_bundle, *flags), generated(tiny_bundle, *flags)
    assert first["seed"] != second["seed"] and first["token_ids"] != second["token_ids"]
    third = generated(tiny_bundle, *flags, "--seed", first["seed"])
    assert third["token_ids"] == first["token_ids"]


def test_stop_ends_the_text_before_it(tiny_bundle: Path):
    whole = generated(tiny_bundle, "-p", PROMPT, "--max-new-tokens", 30)["text"]
    stop = whole[10:13]
    answer = generated(tiny_bundle, "-p", PROMPT, "--max-new-tokens", 30, "--stop", stop)
    assert answer["text"] == whole[: whole.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize(
    ("flags", "prompt"),
    [
        ([], "<bos>[user]hello\n[assistant]"),
        (["--system", "short"], "<bos>[system]short\n[user]hello\n[assistant]"),
    ],
)
def test_the_chat_flag_applies_the_template(tiny_bundle: Path, flags: list[str], prompt: str):
    templated = generated(tiny_bundle, "-p", prompt, "--max-new-tokens", 1)
    chat = generated(tiny_bundle, "-p", "hello", "--chat", *flags, "--max-new-tokens", 1)
    assert chat["prompt_ids"] == templated["prompt_ids"]


REFUSED_FLAGS = {  # case: (flags, words of the error)
    "empty stop": (["--stop", "a", "--stop", ""], "--stop is empty"),
    "unknown plan": (
        ["--plan", "AR"],
        "unknown plan 'AR': choose one of ar, two-pass, fused, tree-3, tree-5, tree-8, "
        "tree-16, auto, or group sizes",
    ),
    "lookahead beyond the bundle": (["--lookahead", "7"], "0 to 6"),
    "negative lookahead": (["--lookahead", "-1"], "0 to 6"),
    "negative temperature": (["--temperature", "-1"], "temperature"),
    "temperature not a number": (["--temperature", "nan"], "temperature"),
    "top-p -1": (["--top-p", "-1"], "top-p"),
    "top-k too large": (["--top-k", "1025"], "1024"),
    "negative seed": (["--seed", "-1"], "seed"),
    "no tokens": (["--max-new-tokens", "0"], "max-new-tokens"),
    "unknown device": (["--device", "abacus"], "abacus"),
    "negative threads": (["--threads", "-1"], "threads must be 0"),
    "threads without end": (
        ["--threads", "100000"],
        "threads must be 0 (ONNX Runtime's choice) to ",
    ),
    "system message without chat": (["--system", "Be brief."], "add --chat"),
    "newline of a prompt that is given": (["--keep-newline"], "--keep-newline"),
    "two prompts": (["--prompt-file", "x"], "not both"),
}


@pytest.mark.parametrize("case", REFUSED_FLAGS)
def test_refused_flags(tiny_bundle: Path, case: str):
    flags, expected = REFUSED_FLAGS[case]
    assert expected in refusal("generate", tiny_bundle, "-p", PROMPT, *flags)


def test_unreadable_and_too_long_prompts_are_refused(tiny_bundle: Path, tmp_path: Path):
    latin1, missing = tmp_path / "latin1.txt", tmp_path / "missing.txt"
    latin1.write_bytes("Straße".encode("latin-1"))
    assert "not UTF-8" in refusal("generate", tiny_bundle, "--prompt-file", latin1)
    assert "missing.txt" in refusal("generate", tiny_bundle, "--prompt-file", missing)
    assert str(tmp_path) in refusal("generate", tiny_bundle, "--prompt-file", tmp_path)
    assert "more than the KV capacity of 768" in refusal("generate", tiny_bundle, "-p", "12 " * 800)
    line = refusal("generate", tiny_bundle, stdin=b"\xff\xfe")
    assert line == "error: the prompt in standard input is not UTF-8 text\n"


@pytest.mark.parametrize("explain", [(), ("--explain",)], ids=["", "explained"])
def test_a_prompt_that_fills_the_capacity_gets_one_token(
    tiny_bundle: Path, explain: tuple[str, ...]
):
    """Also with the default plan, `auto`, which otherwise times passes after the first token."""
    length = len(generated(tiny_bundle, "-p", PROMPT, "--max-new-tokens", 1)["prompt_ids"])
    added = -length % 4  # capacities are multiples of 4
    prompt, capacity = PROMPT + "1" * added, length + added  # a digit is one token
    answer = generated(tiny_bundle, "--capacity", capacity, "-p", prompt, *explain)
    assert len(answer["prompt_ids"]) == capacity
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (1, "length")


def test_a_prompt_that_is_not_utf8_is_refused(tiny_bundle: Path):
    """Python decodes such bytes to lone surrogates, which no tokenizer accepts."""
    command = [*PASS_RUN, "generate", str(tiny_bundle), "-p", b"Stra\xdfe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "UTF-8" in assert_refused(done.returncode, done.stdout, done.stderr)


def test_a_directory_that_is_no_bundle_is_refused(tmp_path: Path):
    assert "is not a bundle" in refusal("generate", tmp_path, "-p", PROMPT)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model in (tmp_path, tmp_path / "model.gguf"):
        line = refusal("generate", model, "-p", PROMPT)
        assert f"not a bundle: make a bundle with `pass-export --model {model}`" in line
    assert "is not a bundle" in refusal("generate", tmp_path / "nowhere", "-p", PROMPT)


@pytest.mark.parametrize(
    "name", ["trunk.onnx", "trunk.onnx.data", "tokenizer.json", "tail.ar.greedy.onnx"]
)
def test_a_changed_byte_is_found(tiny_bundle: Path, tmp_path: Path, name: str):
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without=name)
    content = bytearray((tiny_bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    line = refusal("generate", copy, "-p", PROMPT)
    assert name in line and "SHA-256" in line


def test_a_missing_and_a_short_file_are_found(tiny_bundle: Path, tmp_path: Path):
    name = "trunk.onnx.data"
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without=name)
    assert "is missing" in refusal("generate", copy, "-p", PROMPT, "--trust-bundle")
    (copy / name).write_bytes((tiny_bundle / name).read_bytes()[:-1])
    assert "bytes instead of" in refusal("generate", copy, "-p", PROMPT, "--trust-bundle")


MANIFEST_CHANGES: dict[str, tuple[dict, str]] = {
    "version": ({"version": 1}, "version 1 is not 4"),
    "unknown key": ({"speed": "warp"}, "unknown key 'speed'"),
    "noise": (
        {"noise": {"scheme": "other", "members": 8, "row": 16, "bits": 30}},
        "noise scheme 'other'",
    ),
    "format": ({"format": "zip"}, "format"),
}


@pytest.mark.parametrize("case", MANIFEST_CHANGES)
def test_a_manifest_that_does_not_fit_is_refused(tiny_bundle: Path, tmp_path: Path, case: str):
    change, expected = MANIFEST_CHANGES[case]
    name = "pass_config.json"
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without=name)
    manifest = json.loads((tiny_bundle / name).read_text())
    (copy / name).write_text(json.dumps(manifest | change))
    line = refusal("generate", copy, "-p", PROMPT)
    assert expected in line and name in line


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff"], ids=repr)
def test_a_file_that_is_no_manifest_is_refused(tiny_bundle: Path, tmp_path: Path, content: bytes):
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without="pass_config.json")
    (copy / "pass_config.json").write_bytes(content)
    assert "pass_config.json" in refusal("generate", copy, "-p", PROMPT)


USAGE = {  # case: (arguments, words of the error, the help that it names)
    "no command": ([], "missing command", "--help"),
    "unknown command": (["generat"], "'generat'", "--help"),
    "no bundle": (["generate"], "missing argument 'BUNDLE'", "generate --help"),
    "no results": (["batch", "a", "b"], "missing argument 'RESULTS'", "batch --help"),
    "one argument too many": (
        ["generate", "a", "b"],
        "unexpected extra argument",
        "generate --help",
    ),
    "unknown flag": (["generate", "a", "--wrap"], "no such option '--wrap'", "generate --help"),
    "no value": (
        ["generate", "a", "--prompt"],
        "'--prompt' requires an argument",
        "generate --help",
    ),
    "not a number": (["chat", "a", "--top-k", "many"], "'many' is not a valid", "chat --help"),
    "not a choice": (["bench", "a", "--draft", "x"], "'lookahead', 'ngram'", "bench --help"),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage_errors_are_one_line(case: str):
    arguments, expected, help_command = USAGE[case]
    line = refusal(*arguments)
    line = line.replace("option: --wrap", "option '--wrap'")  # click 8.1 words it differently
    assert expected in line and line.endswith(f" {help_command}\n") and "; see " in line
