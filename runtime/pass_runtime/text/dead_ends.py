"""Takes dead ends out of JSON schemas: what a text may begin with, but never end.

llguidance looks at a part of a schema when the text gets there. So it lets a text begin an optional property, an item
or an alternative that has no finite value (a loop of `$ref`), and a comma before properties of a pattern whose only
names are used already. Here such parts become `false`, and patterns with few names become properties.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from re import _parser  # type: ignore[attr-defined]  # what `re` reads a pattern with
from typing import Any

MAX_NAMES = 64
"""A pattern with more names than this stays one."""
MAX_STEPS = 100_000
"""How many parts of a schema are looked at, counting each time. Schemas can refer to one another without bound."""
PARTS = ("properties", "patternProperties", "$defs", "definitions")
SINGLE = ("additionalProperties", "items", "not", "if", "then", "else", "contains", "propertyNames")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
OPTIONAL = ("additionalProperties", "items")
"""Keywords whose schema need not be met by anything."""


def without_dead_ends(schema: Any) -> Any:
    """A schema with the same finite values. It is not changed itself. A schema that takes more than MAX_STEPS, or is
    nested too deep, is returned as it is: llguidance has limits, too."""
    try:
        found = _with_names_of_patterns(schema)
        finite = _Finite(found)
        return _without_endless(found, finite) if finite.endless else found
    except (_TooMuch, RecursionError):
        return schema


class _TooMuch(Exception):
    """More than MAX_STEPS."""


class _Finite:
    """Which schemas have a finite value, by the `$ref` targets that have one. endless: whether a target has none."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: set[str] = set()
        self._steps = 0
        left = set(_refs(root))
        while found := {ref for ref in left if self.has(self._target(ref))}:
            self._known |= found
            left -= found
        self.endless = bool(left)

    def has(self, schema: Any) -> bool:
        """Whether a schema has a finite value, as far as `$ref`, types and required parts tell."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooMuch
        if not isinstance(schema, dict):
            return schema is not False
        if "$ref" in schema and schema["$ref"] not in self._known:
            return False
        if not all(self.has(each) for each in _list(schema, "allOf")):
            return False
        for name in ("anyOf", "oneOf"):
            if (branches := _list(schema, name)) and not any(self.has(each) for each in branches):
                return False
        types = schema.get("type")
        types = types if isinstance(types, list) else [types]
        kinds = {"object": self._has_object, "array": self._has_array}
        return any(each not in kinds or kinds[each](schema) for each in types)

    def _has_object(self, schema: Mapping[str, Any]) -> bool:
        properties = _dict(schema, "properties")
        other = schema.get("additionalProperties", True) if not schema.get("patternProperties") else True
        return all(self.has(properties.get(name, other)) for name in _list(schema, "required") if isinstance(name, str))

    def _has_array(self, schema: Mapping[str, Any]) -> bool:
        least, first = schema.get("minItems", 0), _list(schema, "prefixItems")
        if not isinstance(least, int | float) or least <= 0:
            return True
        rest = True if least <= len(first) else self.has(schema.get("items", True))
        return rest and all(self.has(each) for each in first[: int(least)])

    def _target(self, ref: str) -> Any:
        """What a `$ref` in this schema leads to; True if it leads elsewhere."""
        found = self._root
        for part in ref.removeprefix("#").split("/")[1:] if ref.startswith("#") else ():
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                return True  # llguidance says what is wrong
        return found if ref.startswith("#") else True


def _without_endless(schema: Any, finite: _Finite) -> Any:
    """`schema` with `false` for parts that have no finite value and that a text need not have."""
    if not isinstance(schema, dict):
        return schema

    def part(value: Any, *, optional: bool) -> Any:
        return False if optional and not finite.has(value) else _without_endless(value, finite)

    found = dict(schema)
    required = _list(schema, "required")
    for name in PARTS:
        if isinstance(schema.get(name), dict):
            of_objects = name in ("properties", "patternProperties")
            found[name] = {
                key: part(each, optional=of_objects and key not in required) for key, each in schema[name].items()
            }
    for name in SINGLE:
        if name in schema:
            found[name] = part(schema[name], optional=name in OPTIONAL)
    for name in LISTS:
        if isinstance(schema.get(name), list):
            parts = [part(each, optional=name in ("anyOf", "oneOf")) for each in schema[name]]
            found[name] = [each for each in parts if each is not False or name not in ("anyOf", "oneOf")] or [False]
    return found


def _with_names_of_patterns(schema: Any) -> Any:
    """`schema` with properties in place of `patternProperties` that have few names."""
    if isinstance(schema, list):
        return [_with_names_of_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: each if key in ("enum", "const", "default", "examples") else _with_names_of_patterns(each)
        for key, each in schema.items()
    }
    patterns = _dict(found, "patternProperties")
    names = {pattern: names for pattern in patterns if (names := _names(pattern)) is not None}
    if not names:
        return found
    properties = dict(_dict(found, "properties"))
    for pattern, words in names.items():
        for name in words:
            both = [properties[name], patterns[pattern]] if name in properties else []
            properties[name] = {"allOf": both} if both and both[0] != both[1] else patterns[pattern]
    left = {pattern: value for pattern, value in patterns.items() if pattern not in names}
    return found | {"properties": properties, "patternProperties": left}


def _names(pattern: str) -> list[str] | None:
    """All names that a pattern matches, in its order; None if they are more than MAX_NAMES."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    try:
        parsed = list(_parser.parse(pattern))
        if str(parsed[0]) != "(AT, AT_BEGINNING)" or str(parsed[-1]) != "(AT, AT_END)":
            return None
        return list(dict.fromkeys(_words(parsed[1:-1])))
    except (re.error, RecursionError, OverflowError, ValueError):
        return None


def _words(parts: Any) -> list[str]:
    """All texts that a parsed pattern matches. Raises ValueError if they are too many, or it has other elements."""
    found = [""]
    for kind, value in parts:
        found = [begin + end for begin in found for end in _choices(str(kind), value)]
        if len(found) > MAX_NAMES:
            raise ValueError
    return found


def _choices(kind: str, value: Any) -> list[str]:
    if kind == "LITERAL":
        return [chr(value)]
    if kind == "IN":
        return list(_characters(value))
    if kind == "BRANCH":
        return [word for branch in value[1] for word in _words(branch)]
    if kind == "SUBPATTERN":
        return _words(value[-1])
    if kind in ("MAX_REPEAT", "MIN_REPEAT") and value[1] <= MAX_NAMES:
        return [word for times in range(value[0], value[1] + 1) for word in _words(list(value[2]) * times)]
    raise ValueError


def _characters(parts: Any) -> Iterator[str]:
    for kind, value in parts:
        if str(kind) == "LITERAL":
            yield chr(value)
        elif str(kind) == "RANGE" and value[1] - value[0] < MAX_NAMES:
            yield from map(chr, range(value[0], value[1] + 1))
        else:
            raise ValueError


def _refs(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for each in schema.values():
            yield from _refs(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _refs(each)


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    return found if isinstance(found := schema.get(name), list) else []


def _dict(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    return found if isinstance(found := schema.get(name), dict) else {}
