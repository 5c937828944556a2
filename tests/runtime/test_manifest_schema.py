from __future__ import annotations

import copy
import json
import subprocess
import sys

import jsonschema
import pytest
from manifests import at, one_of_each_kind, paths, real_document

from pass_runtime.bundle import schema


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    file_schema = json.loads(schema.SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(file_schema)
    return jsonschema.Draft202012Validator(file_schema)


def test_the_schema_file_is_current():
    assert schema.SCHEMA_FILE.read_text(encoding="utf-8") == schema.schema_text()


def test_the_command_writes_the_schema_file():
    before = schema.SCHEMA_FILE.read_bytes()
    subprocess.run([sys.executable, "-m", "pass_runtime.bundle.schema"], check=True)
    assert schema.SCHEMA_FILE.read_bytes() == before


def test_real_manifests_are_valid(validator, tiny_bundle, adapter_bundle):
    for bundle in (tiny_bundle, adapter_bundle):
        validator.validate(real_document(bundle))


def test_changed_manifests_are_not_valid(validator, tiny_bundle):
    document = real_document(tiny_bundle)
    # Few windows and one file, because validation is slow and they are all alike.
    files = {"trunk.onnx": document["files"]["trunk.onnx"]}
    document |= {"windows": document["windows"][:4], "files": files}
    assert validator.is_valid(document)
    assert not validator.is_valid(document | {"version": 1})
    assert not validator.is_valid(document | {"news": 1})
    without_feeds = {name: value for name, value in document.items() if name != "feeds"}
    assert not validator.is_valid(without_feeds)
    for path in one_of_each_kind(paths(document)):
        changed = copy.deepcopy(document)
        at(changed, path[:-1])[path[-1]] = {"x": []}
        assert not validator.is_valid(changed), path
