from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from pass_runtime import Constraint, GenerateOptions, SamplingParams, Session, load

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
