"""pass-run generate: what it prints, where prompts come from, and what it refuses."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from pass_run import PASS_RUN, assert_refused, output, process, refusal

PROMPT = "The quick brown fox"
STATS = {"plan", "passes", "mean_acceptance_length", "acceptance_per_position"}
STATS |= {"prefill_seconds", "decode_seconds", "decode_tokens_per_second"}


def generated(bundle: Path, *arguments: object, stdin: str | bytes = "") -> dict:
    return json.loads(output("generate", bundle, "--json", "--ignore-eos", *arguments, stdin=stdin))


def test_json_has_the_documented_keys(tiny_bundle):
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
def test_generate_in_a_process_of_its_own(tiny_bundle):
    done = process("generate", tiny_bundle, "--json", "--max-new-tokens", 4, stdin=PROMPT)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["token_ids"]) <= 4
    line = process("generate", tiny_bundle, "--wrap").stderr
    assert line.endswith("; see pass-run generate --help\n")


def test_printed_text_is_the_text_of_the_json(tiny_bundle):
    text = output("generate", tiny_bundle, "-p", PROMPT, "--max-new-tokens", 20, "--ignore-eos")
    assert text == generated(tiny_bundle, "-p", PROMPT, "--max-new-tokens", 20)["text"] + "\n"


@pytest.mark.slow
def test_a_files_last_line_feed_is_not_part_of_the_prompt(tiny_bundle, tmp_path):
    def ids(*arguments: object, stdin: str | bytes = "") -> list[int]:
        return generated(tiny_bundle, *arguments, "--max-new-tokens", 1, stdin=stdin)["prompt_ids"]

    file = tmp_path / "prompt.txt"
    prompt = "Über 🦊\ndog"
    alone = ids("-p", prompt)
    for ending in (b"", b"\n"):
        file.write_bytes(prompt.encode() + ending)
        assert ids("--prompt-file", file) == ids(stdin=file.read_bytes()) == alone
        assert ids("--prompt-file", "-", stdin=file.read_bytes()) == alone
    assert ids("--prompt-file", file, "--keep-newline") == ids("-p", f"{prompt}\n") != alone
    assert ids("--keep-newline", stdin="fox\ndog\n") == ids("-p", "fox\ndog\n")
    assert ids(stdin="fox\ndog\n\n") == ids("-p", "fox\ndog\n")  # only one line feed is cut
    assert ids(stdin=b"fox\r\n") == ids("-p", "fox")
    assert ids(stdin=b"\xef\xbb\xbffox") == ids("-p", "fox")  # a byte order mark


def test_an_empty_prompt_begins_at_the_start_token(tiny_bundle, tmp_path):
    file = tmp_path / "prompt.txt"
    one_token = ("--max-new-tokens", 1)
    assert generated(tiny_bundle, "-p", "", *one_token)["prompt_ids"] == [0]
    for content in ("", "\n"):
        file.write_text(content)
        assert generated(tiny_bundle, "--prompt-file", file, *one_token)["prompt_ids"] == [0]
        assert generated(tiny_bundle, *one_token, stdin=content)["prompt_ids"] == [0]


def test_a_closed_standard_input_is_refused(tiny_bundle):
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *PASS_RUN, "generate", str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "standard input is closed" in assert_refused(done.returncode, done.stdout, done.stderr)


REFUSED_FLAGS = [  # flags, words of the error
    ("--stop a --stop ''", "--stop is empty"),
    ("--plan AR", "unknown plan 'AR': choose one of ar, two-pass, fused, auto, or group sizes"),
    ("--lookahead 7", "0 to 6"),
    ("--max-new-tokens 0", "max-new-tokens"),
    ("--device abacus", "abacus"),
    ("--threads 100000", "threads must be 0 (ONNX Runtime's choice) to "),
    ("--system short", "add --chat"),
    ("--keep-newline", "--keep-newline"),
    ("--prompt-file x", "not both"),
    ("--regex '('", "the regex is not valid"),
    ("--regex a --json-object", "exactly one of"),
    ("--json-schema /nowhere.json", "cannot read /nowhere.json: No such file"),
    ("--logit-bias fox=1", "is not a token id"),
    ("--logit-bias 9999999=1", "not in the vocabulary"),
    ("--regex a --ignore-eos", "leave out ignore-eos"),
]


@pytest.mark.parametrize(("flags", "expected"), REFUSED_FLAGS)
def test_refused_flags(tiny_bundle, flags, expected):
    assert expected in refusal("generate", tiny_bundle, "-p", PROMPT, *shlex.split(flags))


def test_unreadable_and_too_long_prompts_are_refused(tiny_bundle, tmp_path):
    latin1, missing = tmp_path / "latin1.txt", tmp_path / "missing.txt"
    latin1.write_bytes("Straße".encode("latin-1"))
    assert "not UTF-8" in refusal("generate", tiny_bundle, "--prompt-file", latin1)
    assert "missing.txt" in refusal("generate", tiny_bundle, "--prompt-file", missing)
    assert str(tmp_path) in refusal("generate", tiny_bundle, "--prompt-file", tmp_path)
    assert "more than the KV capacity of 768" in refusal("generate", tiny_bundle, "-p", "12 " * 800)
    line = refusal("generate", tiny_bundle, stdin=b"\xff\xfe")
    assert line == "error: the prompt in standard input is not UTF-8 text\n"
    # Python decodes such bytes of a flag to lone surrogates, which no tokenizer accepts.
    assert "UTF-8" in refusal(
        "generate", tiny_bundle, "-p", b"Stra\xdfe".decode(errors="surrogateescape")
    )


@pytest.mark.parametrize("explain", [(), ("--explain",)], ids=["", "explained"])
def test_a_prompt_that_fills_the_capacity_gets_one_token(tiny_bundle, explain):
    """Also with the default plan, `auto`, which otherwise times passes after the first token."""
    length = len(generated(tiny_bundle, "-p", PROMPT, "--max-new-tokens", 1)["prompt_ids"])
    added = -length % 4  # capacities are multiples of 4
    prompt, capacity = PROMPT + "1" * added, length + added  # a digit is one token
    answer = generated(tiny_bundle, "--capacity", capacity, "-p", prompt, *explain)
    assert len(answer["prompt_ids"]) == capacity
    assert (len(answer["token_ids"]), answer["finish_reason"]) == (1, "length")


def test_a_directory_that_is_no_bundle_is_refused(tmp_path):
    assert "is not a bundle" in refusal("generate", tmp_path, "-p", PROMPT)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model in (tmp_path, tmp_path / "model.gguf"):
        line = refusal("generate", model, "-p", PROMPT)
        assert f"not a bundle: make a bundle with `pass-export --model {model}`" in line
    assert "is not a bundle" in refusal("generate", tmp_path / "nowhere", "-p", PROMPT)


USAGE = [  # arguments, words of the error, the help that it names
    ("", "missing command", "--help"),
    ("generat", "'generat'", "--help"),
    ("generate", "missing argument 'BUNDLE'", "generate --help"),
    ("batch a b", "missing argument 'RESULTS'", "batch --help"),
    ("generate a b", "unexpected extra argument", "generate --help"),
    ("generate a --wrap", "no such option '--wrap'", "generate --help"),
    ("generate a --prompt", "'--prompt' requires an argument", "generate --help"),
    ("chat a --top-k many", "'many' is not a valid", "chat --help"),
    ("bench a --draft x", "'lookahead', 'ngram'", "bench --help"),
]


@pytest.mark.parametrize(("arguments", "expected", "help_command"), USAGE)
def test_usage_errors_are_one_line(arguments, expected, help_command):
    line = refusal(*arguments.split())
    line = line.replace("option: --wrap", "option '--wrap'")  # click 8.1 words it differently
    assert expected in line and line.endswith(f" {help_command}\n") and "; see " in line
