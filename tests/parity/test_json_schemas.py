from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from pass_runtime import Constraint, GenerateOptions, PassError, SamplingParams, Session, load

SCHEMAS = Path(__file__).with_name("json_schemas.jsonl")
CASES = [json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]


def problem(schema: dict[str, Any], text: str) -> str | None:
    """Return why `text` is not JSON of `schema`; None if it is."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    errors = list(Draft202012Validator(schema, format_checker=FormatChecker()).iter_errors(value))
    return errors[0].message if errors else None


@pytest.fixture(scope="module")
def bundle_session(random_bundle: Path) -> Session:
    return load(random_bundle, "cpu", threads=1)


def test_there_are_200_different_schemas():
    assert len({json.dumps(case["schema"], sort_keys=True) for case in CASES}) == 200


@pytest.mark.slow
def test_a_text_that_ends_is_valid(bundle_session: Session):
    counts = Counter[str]()
    for seed, case in enumerate(CASES):
        constraint = Constraint(json_schema=case["schema"])
        sampling = SamplingParams(1.0, seed=seed)
        options = GenerateOptions(120, sampling, plan="two-pass", constraint=constraint)
        generation = bundle_session.generate(case["prompt"], options).result()
        counts[generation.finish_reason] += 1
        if generation.finish_reason == "stop":
            error = problem(case["schema"], generation.text)
            assert error is None, (case, error, generation.text)
    assert counts["stop"] > 30, "too few texts ended"


MANY_PROPERTIES = {f"p{i}": {"type": "string"} for i in range(5000)}
CONSTRAINTS = [
    ({"regex": "("}, "the regex is not valid"),
    ({"grammar": "start: missing"}, "the grammar is not valid"),
    ({"json_schema": {"type": "strin"}}, "the json_schema is not valid"),
    ({"json_schema": {"$ref": "#/nowhere"}}, "the json_schema is not valid"),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"regex": "(?=a)b"}, "the regex is not valid"),
    ({"regex": "a{1,100000}" * 50}, ""),
    ({"json_schema": {"type": "object", "properties": MANY_PROPERTIES}}, ""),
    ({"regex": "((a|b)*c(d|e)*){30,3000}" * 10}, ""),
    ({"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(20_000))}, ""),
]
"""Constraints, and why each is refused; "" for large ones, which may also be accepted."""


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "reason"), CONSTRAINTS, ids=lambda value: str(value)[:40])
def test_a_wrong_or_huge_constraint_costs_seconds_at_most(
    bundle_session: Session, fields: dict, reason: str
):
    started = time.process_time()
    try:
        options = GenerateOptions(8, SamplingParams(1.0, seed=1), constraint=Constraint(**fields))
        bundle_session.generate("a", options).result()
        assert not reason, "it should have been refused"
    except PassError as error:
        message = str(error)
        assert reason in message and len(message.splitlines()) == 1 and len(message) < 400
    assert time.process_time() - started < 30
    after = bundle_session.generate("a", GenerateOptions(3, ignore_eos=True)).result()
    assert len(after.token_ids) == 3


def test_constraints_and_biases_beyond_the_limits_are_refused():
    with pytest.raises(PassError, match="logit-bias has 10000 tokens; at most 1024"):
        SamplingParams(logit_bias=dict.fromkeys(range(10_000), 1.0))
    with pytest.raises(PassError, match="at most 1048576 are allowed"):
        Constraint(regex="a" * (1 << 21))
    with pytest.raises(PassError, match="exactly one of"):
        Constraint(regex="a", choice=["b"])
    with pytest.raises(PassError, match="exactly one of"):
        Constraint()
    with pytest.raises(PassError, match="ends the text"):
        GenerateOptions(ignore_eos=True, constraint=Constraint(regex="a"))
