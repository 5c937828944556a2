"""pass-run with constraints, penalties and biases: what each option does, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pass_run import output, read_jsonl, refusal, write_jsonl

PROMPT = ("-p", "The quick brown fox")


def generated(bundle: Path, *arguments: object) -> dict:
    return json.loads(output("generate", bundle, "--json", *PROMPT, *arguments))


@pytest.mark.slow
def test_each_constraint(tiny_bundle: Path, tmp_path: Path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "two.lark"
    schema.write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], '
        '"additionalProperties": false}'
    )
    grammar.write_text('start: "one" | "two"')
    assert json.loads(generated(tiny_bundle, "--json-schema", schema)["text"])["a"] in (1, 2)
    assert generated(tiny_bundle, "--grammar", grammar)["text"] in ("one", "two")
    assert generated(tiny_bundle, "--regex", "[0-9]{3}")["text"].isdigit()
    assert generated(tiny_bundle, "--choice", "yes", "--choice", "no")["text"] in ("yes", "no")
    assert generated(tiny_bundle, "--json-object", "--max-new-tokens", 3)["text"].startswith("{")


def test_each_option_that_changes_logits(tiny_bundle: Path):
    twelve = ("--ignore-eos", "--max-new-tokens", 12)
    plain = generated(tiny_bundle, *twelve)["token_ids"]
    first = plain[0]
    changes = [
        ("--logit-bias", f"{first}=-100"),
        ("--presence-penalty", "2", "--frequency-penalty", "2"),
        ("--repetition-penalty", "50"),
        ("--bad-word", "fox", "--allowed-token-id", "9", "--allowed-token-id", "11"),
    ]
    for flags in changes:
        changed = generated(tiny_bundle, *twelve, *flags)["token_ids"]
        assert changed != plain, flags
    assert set(changed) <= {9, 11}  # the last of the changes
    stop = ("--stop-token-id", first, "--max-new-tokens", 12)
    assert generated(tiny_bundle, *stop)["stats"]["generated_tokens"] == 1
    later = generated(tiny_bundle, *stop, "--min-tokens", 4)
    assert later["stats"]["generated_tokens"] >= 4 and first not in later["token_ids"][:4]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--regex", "("), "the regex is not valid"),
        (("--regex", "a", "--json-object"), "exactly one of"),
        (("--json-schema", "/nowhere.json"), "cannot read /nowhere.json: No such file"),
        (("--logit-bias", "fox=1"), "is not a token id"),
        (("--logit-bias", "5=200"), "logit-bias must be -100 to 100"),
        (("--logit-bias", "9999999=1"), "not in the vocabulary"),
        (("--presence-penalty", "3"), "presence-penalty must be -2 to 2"),
        (("--repetition-penalty", "0"), "repetition-penalty must be"),
        (("--min-tokens", "-1"), "min-tokens must be 0"),
        (("--regex", "a", "--ignore-eos"), "leave out ignore-eos"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refused_flags(tiny_bundle: Path, flags: tuple[str, ...], why: str):
    assert why in refusal("generate", tiny_bundle, *PROMPT, *flags)


def test_lines_of_a_batch_have_their_own_constraints_and_biases(tiny_bundle: Path, tmp_path: Path):
    lines = [
        {"prompt": "a", "choice": ["left", "right"]},
        {"prompt": "a", "json_schema": {"enum": [7]}},
        {"prompt": "a", "allowed_token_ids": [9], "max_new_tokens": 3, "ignore_eos": True},
        {"prompt": "a", "logit_bias": {"11": 100}, "max_new_tokens": 1},
        {"prompt": "a", "logit_bias": {"fox": 100}},
        {"prompt": "a", "regex": "("},
        {"prompt": "a", "regex": "x", "choice": ["y"]},
    ]
    requests, results = write_jsonl(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    output("batch", tiny_bundle, requests, results, "--max-new-tokens", 20)
    choice, schema, allowed, biased, *refused = read_jsonl(results)
    assert choice["text"] in ("left", "right") and schema["text"] == "7"
    assert allowed["token_ids"] == [9, 9, 9] and biased["token_ids"] == [11]
    reasons = ("is not a token id", "not valid", "exactly one of")
    for result, reason in zip(refused, reasons, strict=True):
        assert reason in result["error"]
