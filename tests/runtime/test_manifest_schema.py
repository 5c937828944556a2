"""The manifest's JSON schema is current, and accepts and refuses what the runtime does."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import jsonschema
import pytest
from manifests import at, paths, real_document

from pass_runtime.bundle import schema


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    found = json.loads(schema.SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def test_the_file_is_current():
    """If not: python -m pass_runtime.bundle.schema"""
    assert schema.SCHEMA_FILE.read_text(encoding="utf-8") == schema.schema_text()


def test_the_command_writes_it():
    before = schema.SCHEMA_FILE.read_bytes()
    subprocess.run([sys.executable, "-m", "pass_runtime.bundle.schema"], check=True)
    assert schema.SCHEMA_FILE.read_bytes() == before


def test_real_manifests_are_valid(validator, tiny_bundle, adapter_bundle):
    for bundle in (tiny_bundle, adapter_bundle):
        validator.validate(real_document(bundle))


def test_others_are_not(validator, tiny_bundle):
    document = real_document(tiny_bundle)
    document |= {
        "plans": document["plans"][:4],
        "files": {"trunk.onnx": document["files"]["trunk.onnx"]},
    }
    assert validator.is_valid(document)
    assert not validator.is_valid(document | {"version": 1})
    assert not validator.is_valid(document | {"news": 1})
    assert not validator.is_valid(
        {name: value for name, value in document.items() if name != "feeds"}
    )
    kinds = {
        tuple("*" if isinstance(key, int) else key for key in path): path
        for path in paths(document)
    }
    for path in kinds.values():
        changed = copy.deepcopy(document)
        at(changed, path[:-1])[path[-1]] = {"x": []}
        assert not validator.is_valid(changed), path
