"""pass-run with constraints, penalties and biases: each does what it says, and what is wrong is
said in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pass_run import output, refusal

PROMPT = ("-p", "The quick brown fox")


def generated(bundle: Path, *arguments: object) -> dict:
    return json.loads(output("generate", bundle, "--json", *PROMPT, *arguments))


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


def test_each_change_of_logits(tiny_bundle: Path):
    plain = generated(tiny_bundle, "--ignore-eos", "--max-new-tokens", 12)["token_ids"]
    first = plain[0]
    changes = [
        ("--logit-bias", f"{first}=-100"),
        ("--presence-penalty", "2", "--frequency-penalty", "2"),
        ("--repetition-penalty", "50"),
        ("--bad-word", "fox", "--allowed-token-id", "9", "--allowed-token-id", "11"),
    ]
    for flags in changes:
        changed = generated(tiny_bundle, "--ignore-eos", "--max-new-tokens", 12, *flags)[
            "token_ids"
        ]
        assert changed != plain, flags
    assert set(changed) <= {9, 11}
    end = generated(tiny_bundle, "--stop-token-id", first, "--max-new-tokens", 12)
    assert end["stats"]["generated_tokens"] == 1
    later = generated(
        tiny_bundle, "--stop-token-id", first, "--max-new-tokens", 12, "--min-tokens", 4
    )
    assert later["stats"]["generated_tokens"] >= 4 and first not in later["token_ids"][:4]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--regex", "("), "the regex is not valid"),
        (("--regex", "a", "--json-object"), "exactly one of"),
        (
            ("--json-schema", "/nowhere.json"),
            "cannot read /nowhere.json: No such file or directory",
        ),
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
def test_what_is_wrong_is_said(tiny_bundle: Path, flags: tuple[str, ...], why: str):
    assert why in refusal("generate", tiny_bundle, *PROMPT, *flags)


def test_lines_of_a_batch_have_their_own(tiny_bundle: Path, tmp_path: Path):
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"prompt": "a", "choice": ["left", "right"]},
        {"prompt": "a", "json_schema": {"enum": [7]}},
        {"prompt": "a", "allowed_token_ids": [9], "max_new_tokens": 3, "ignore_eos": True},
        {"prompt": "a", "logit_bias": {"11": 100}, "max_new_tokens": 1},
        {"prompt": "a", "logit_bias": {"fox": 100}},
        {"prompt": "a", "regex": "("},
        {"prompt": "a", "regex": "x", "choice": ["y"]},
    ]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output("batch", tiny_bundle, requests, results, "--max-new-tokens", 20)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert found[0]["text"] in ("left", "right") and found[1]["text"] == "7"
    assert found[2]["token_ids"] == [9, 9, 9] and found[3]["token_ids"] == [11]
    for answer, why in zip(
        found[4:], ("is not a token id", "not valid", "exactly one of"), strict=True
    ):
        assert why in answer["error"]
