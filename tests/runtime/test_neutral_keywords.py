"""Keywords of JSON schemas that allow every value are no reason to refuse a schema; those that
forbid values stay refused, and are named with their path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from test_grammars import TOKENIZER, VOCAB_SIZE

from pass_runtime.errors import PassError
from pass_runtime.text.constraint import Constraint
from pass_runtime.text.grammar import Grammars
from pass_runtime.text.neutral_keywords import FORMATS, without_neutral_keywords

OBJECT, ARRAY, TEXT = ({"type": kind} for kind in ("object", "array", "string"))
LIMIT = {"const": 1}
NEUTRAL: dict[str, dict[str, Any]] = {
    "names of any text": OBJECT | {"propertyNames": TEXT},  # Zod writes it for every record
    "names of text or null": OBJECT | {"propertyNames": {"type": ["null", "string"]}},
    "described names": OBJECT | {"propertyNames": TEXT | {"title": "a", "format": "path"}},
    "names without a limit": OBJECT | {"propertyNames": {}},
    "any names": OBJECT | {"propertyNames": True},
    "equal items": ARRAY | {"uniqueItems": False},
    "minContains alone": ARRAY | {"minContains": 2},
    "maxContains alone": ARRAY | {"maxContains": 2},
    "contains none": ARRAY | {"contains": LIMIT, "minContains": 0},
    "any other properties": OBJECT | {"unevaluatedProperties": True},
    "other properties without a limit": OBJECT | {"unevaluatedProperties": {"title": "a"}},
    "any other items": ARRAY | {"unevaluatedItems": True},
    "no dependent properties": OBJECT | {"dependentRequired": {}},
    "an empty list of them": OBJECT | {"dependentRequired": {"a": []}},
    "dependent schemas of all": OBJECT | {"dependentSchemas": {"a": True, "b": {}}},
    "dependencies": OBJECT | {"dependencies": {"a": [], "b": {}}},
    "if alone": {"if": LIMIT},
    "if with branches of all": {"if": LIMIT, "then": True, "else": {"description": "a"}},
    "then alone": {"then": LIMIT},
    "else alone": {"else": LIMIT},
    "not nothing": {"not": False},
    "limits of other types": TEXT
    | {
        "uniqueItems": True,
        "contains": LIMIT,
        "propertyNames": LIMIT,
        "dependencies": {"a": ["b"]},
    },
    "of items": ARRAY | {"items": ARRAY | {"uniqueItems": False}},
    "of first items": {"prefixItems": [ARRAY | {"uniqueItems": False}]},
    "of alternatives": {"anyOf": [TEXT, {"allOf": [OBJECT | {"propertyNames": TEXT}]}]},
    "of other properties": OBJECT | {"additionalProperties": {"not": False}},
    "of definitions": {"$ref": "#/$defs/a", "$defs": {"a": ARRAY | {"uniqueItems": False}}},
    "of patterns": OBJECT | {"patternProperties": {"^a": {"not": False}}},
    "an unknown dialect": {"$schema": "https://example.org/dialect"},
    "a dialect by its other address": {"$schema": "https://json-schema.org/draft-07/schema#"},
}
ANNOTATIONS = ("password", "binary", "byte", "path", "file-path", "textarea", "html", "int64", "")
NEUTRAL |= {f"the format {name!r}": TEXT | {"format": name} for name in ANNOTATIONS}
NEUTRAL["a format without a type"] = {"format": "password"}
LIMITS: dict[str, tuple[dict[str, Any], str]] = {  # schemas, and the path that the error names
    "a name": (OBJECT | {"propertyNames": {"const": "a"}}, "propertyNames"),
    "short names": (OBJECT | {"propertyNames": TEXT | {"maxLength": 3}}, "propertyNames"),
    "names of numbers": (OBJECT | {"propertyNames": {"type": "number"}}, "propertyNames"),
    "different items": (ARRAY | {"uniqueItems": True}, "uniqueItems"),
    "contains": (ARRAY | {"contains": LIMIT}, "contains"),
    "contains few": (ARRAY | {"contains": LIMIT, "minContains": 0, "maxContains": 1}, "contains"),
    "no other properties": (OBJECT | {"unevaluatedProperties": False}, "unevaluatedProperties"),
    "texts as other items": (ARRAY | {"unevaluatedItems": TEXT}, "unevaluatedItems"),
    "dependent": (OBJECT | {"dependentRequired": {"a": [], "b": ["c"]}}, "dependentRequired"),
    "dependent schemas": (OBJECT | {"dependentSchemas": {"a": LIMIT}}, "dependentSchemas"),
    "a branch": ({"if": TEXT, "then": True, "else": LIMIT}, "if"),
    "not": ({"not": {}}, "not"),
    "a second list": (
        {"anyOf": [ARRAY | {"uniqueItems": False}, ARRAY | {"uniqueItems": True}]},
        "anyOf.1.uniqueItems",
    ),
    "beside a property of that name": (
        OBJECT | {"properties": {"uniqueItems": ARRAY | {"uniqueItems": True}}},
        "properties.uniqueItems.uniqueItems",
    ),
    **{
        f"the format {name}": (TEXT | {"format": name}, "format")
        for name in ("regex", "json-pointer", "uri-reference", "idn-email")
    },
}
VALUES = [
    *(None, True, 0, 1, "", "a", [], [1], [1, 1], ["a", 2], [[]], [[1, 1]]),
    *({}, {"a": 1}, {"a": [1, 1], "b": {}}, {"abcd": "x"}, {"uniqueItems": [2]}),
]


@pytest.fixture(scope="module")
def grammars():
    made = Grammars(TOKENIZER, VOCAB_SIZE, [0])
    yield made
    made.close()


def tool_call(*schemas: dict[str, Any]) -> Constraint:
    """Return a grammar as the server makes it of the schemas of tools."""
    rules = [
        f"r{i}: %json {json.dumps({'title': f'tool{i}'} | schema)}"
        for i, schema in enumerate(schemas)
    ]
    start = " | ".join(f"r{i}" for i in range(len(schemas)))
    return Constraint(grammar="\n".join([f"start: {start}", *rules]))


@pytest.mark.parametrize("schema", NEUTRAL.values(), ids=NEUTRAL)
def test_keywords_that_allow_every_value_are_left_out(grammars, schema):
    """The values of the schema stay the same. Dialects of validators are of no matter here."""
    before = json.dumps(schema)
    validator = Draft7Validator if "dependencies" in schema else Draft202012Validator
    kept = without_neutral_keywords(schema)
    assert json.dumps(schema) == before != json.dumps(kept)
    for value in VALUES:
        assert validator(schema).is_valid(value) == validator(kept).is_valid(value), value
    grammars.start(Constraint(json_schema=schema))
    grammars.start(tool_call(schema, TEXT))


@pytest.mark.parametrize(("schema", "path"), LIMITS.values(), ids=LIMITS)
def test_limits_that_cannot_be_kept_are_refused_by_path(grammars, schema, path):
    with pytest.raises(PassError, match=f"^the json_schema is not valid: .*, at {path}: leave"):
        grammars.start(Constraint(json_schema=schema))
    neutral = next(iter(NEUTRAL.values()))
    named = f"^the json_schema of tool1 is not valid: .*, at {path}: leave"
    with pytest.raises(PassError, match=named):
        grammars.start(tool_call(neutral, schema))


VALUES_THAT_LOOK_LIKE_KEYWORDS = {
    "const": {"const": {"uniqueItems": False, "format": "password"}},
    "enum": {"enum": [{"not": False}]},
    "names": OBJECT | {"properties": {"uniqueItems": False, "format": TEXT, "not": False}},
    "default": {"default": {"uniqueItems": False}, "examples": [{"not": False}]},
    "definitions": {"$defs": {"not": False, "format": {"const": "password"}}},
    "formats that are followed": {"anyOf": [TEXT | {"format": name} for name in sorted(FORMATS)]},
}


@pytest.mark.parametrize("schema", VALUES_THAT_LOOK_LIKE_KEYWORDS.values(), ids=str)
def test_what_is_no_such_keyword_is_unchanged(schema):
    assert without_neutral_keywords(schema) == schema


def test_a_schema_that_is_nested_too_deep_is_unchanged():
    schema: dict[str, Any] = {"uniqueItems": False}
    for _ in range(5000):
        schema = {"items": schema}
    assert without_neutral_keywords(schema) is schema
