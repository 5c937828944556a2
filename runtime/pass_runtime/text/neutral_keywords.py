"""Takes keywords that allow every value out of JSON schemas: llguidance refuses some anyway."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pass_runtime.text.dead_ends import LISTS, PARTS, SINGLE

DIALECTS = re.compile(
    r"http://json-schema\.org/draft-0[467]/schema#?|"
    r"https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
FORMATS = {
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
}
"""The formats that JSON Schema defines. Others, such as `password`, are annotations."""
REFUSED = {
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains"), "array"),
    **dict.fromkeys(("propertyNames", "dependentRequired", "dependentSchemas"), "object"),
    **{"unevaluatedItems": "array", "unevaluatedProperties": "object", "dependencies": "object"},
}
"""Keywords that llguidance always refuses, and the type that they limit."""
ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
    *("$id", "$anchor", "$comment", "$schema", "$defs", "definitions"),
}


def without_neutral_keywords(schema: Any) -> Any:
    """Return a schema with the same values; as it is if it is nested too deep."""
    try:
        changed = copy.deepcopy(schema)
        for _, part in places(changed):
            for key in [key for key in part if _is_neutral(key, part)]:
                del part[key]
    except RecursionError:
        return schema
    return changed


def places(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path to each schema in a schema, and the schema."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for key, value in schema.items():
        if key in PARTS and isinstance(value, dict):
            for name, part in value.items():
                yield from places(part, (*path, key, name))
        elif key in LISTS and isinstance(value, list):
            for i, part in enumerate(value):
                yield from places(part, (*path, key, str(i)))
        elif key in SINGLE:
            yield from places(value, (*path, key))


def _is_neutral(key: str, schema: Mapping[str, Any]) -> bool:
    value, types = schema[key], _types(schema)
    if key in REFUSED and types and REFUSED[key] not in types:
        return True
    match key:
        case "$schema":
            return isinstance(value, str) and DIALECTS.fullmatch(value) is None
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case "not" | "uniqueItems" | "$recursiveAnchor":
            return value is False
        case "propertyNames":
            return _allows_all(value, "string")
        case "unevaluatedItems" | "unevaluatedProperties":
            return _allows_all(value)
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "minContains" | "maxContains":
            return "contains" not in schema or _is_neutral("contains", schema)
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return isinstance(value, dict) and all(
                each == [] or _allows_all(each) for each in value.values()
            )
        case "if":
            return all(_allows_all(schema.get(branch, True)) for branch in ("then", "else"))
        case "then" | "else":
            return "if" not in schema or _allows_all(value)
    return False


def _allows_all(schema: Any, kind: str = "") -> bool:
    """Whether a schema allows every value of the type `kind`; "" for every value at all."""
    if not isinstance(schema, dict):
        return schema is True
    limits = {key for key in schema if key not in ANNOTATIONS and not _is_neutral(key, schema)}
    return not limits or (limits == {"type"} and kind in _types(schema))


def _types(schema: Mapping[str, Any]) -> list[Any]:
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]
