"""Takes dead ends out of JSON schemas: parts that a text may begin, but can never end.

llguidance lets a text begin an optional part without a finite value (a loop of `$ref`), and write a
comma before `patternProperties` whose names are all used. Here the former become `false`, and
patterns that match few names become properties."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

MAX_NAMES, MAX_NAME_BYTES = 64, 256
"""A pattern that matches more names, or longer ones, stays a pattern."""
MAX_STEPS = 100_000
"""The most looks at parts of a schema."""
PARTS = ("properties", "patternProperties", "$defs", "definitions")
OPTIONAL = ("additionalProperties", "additionalItems", "items")
SINGLE = (*OPTIONAL, "not", "if", "then", "else", "contains", "propertyNames")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
"""Keywords whose value has schemas by name, is a schema of optional parts, a schema, or a list."""


def without_dead_ends(schema: Any) -> Any:
    """Return a schema with the same finite values, False if it has none. A schema that takes more
    than MAX_STEPS or is nested too deep is returned as it is."""
    try:
        listed = _with_names_of_patterns(schema)
        finite = _Finite(listed)
        if not finite.has_endless_refs:
            return listed
        return _without_endless(listed, finite) if finite.has(listed) else False
    except (_TooManyStepsError, RecursionError):
        return schema


class _TooManyStepsError(Exception):
    """The schema takes more than MAX_STEPS."""


class _Finite:
    """Finds which parts of `root` have a finite value. has_endless_refs: whether a `$ref` leads to
    one that has none."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        self._finite_refs: set[str] = set()
        left = set(_refs(root))
        while newly_finite := {ref for ref in left if self.has(self._target(ref))}:
            self._finite_refs |= newly_finite
            left -= newly_finite
        self.has_endless_refs = bool(left)

    def has(self, schema: Any) -> bool:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _TooManyStepsError
        if not isinstance(schema, dict):
            return schema is not False
        if "$ref" in schema and schema["$ref"] not in self._finite_refs:
            return False
        if not all(self.has(each) for each in _list(schema, "allOf")):
            return False
        for name in ("anyOf", "oneOf"):
            if (branches := _list(schema, name)) and not any(self.has(each) for each in branches):
                return False
        types = schema.get("type")
        types = types if isinstance(types, list) else [types]
        checks = {"object": self._has_object, "array": self._has_array}
        return any(each not in checks or checks[each](schema) for each in types)

    def _has_object(self, schema: Mapping[str, Any]) -> bool:
        properties = _dict(schema, "properties")
        has_patterns = bool(schema.get("patternProperties"))
        other = has_patterns or schema.get("additionalProperties", True)
        return all(
            self.has(properties.get(name, other))
            for name in _list(schema, "required")
            if isinstance(name, str)
        )

    def _has_array(self, schema: Mapping[str, Any]) -> bool:
        min_items, (first_name, rest_name) = schema.get("minItems", 0), _item_keywords(schema)
        if not isinstance(min_items, int | float) or min_items <= 0:
            return True
        first = _list(schema, first_name)
        if min_items > len(first) and not self.has(schema.get(rest_name, True)):
            return False
        return all(self.has(each) for each in first[: int(min_items)])

    def _target(self, ref: str) -> Any:
        base = _text(self._root, "$id")
        url, fragment = urldefrag(urljoin(base, ref))
        part = self._root
        if url != urldefrag(base).url:
            part = _first_part(self._root, lambda each: urljoin(base, _text(each, "$id")) == url)
        anchor, *keys = unquote(fragment).split("/")
        if anchor:
            part = _first_part(part, lambda each: _text(each, "$anchor") == anchor)
        for key in (each.replace("~1", "/").replace("~0", "~") for each in keys):
            if isinstance(part, list) and key.isdigit() and int(key) < len(part):
                part = part[int(key)]
            elif isinstance(part, dict) and key in part:
                part = part[key]
            else:
                return True  # llguidance will say what is wrong.
        return part


def _first_part(schema: Any, is_wanted: Callable[[Any], bool]) -> Any:
    if isinstance(schema, dict) and is_wanted(schema):
        return schema
    wanted = (_first_part(part, is_wanted) for part in _parts(schema))
    return next((part for part in wanted if part is not True), True)


def _parts(schema: Any) -> list[Any]:
    if isinstance(schema, dict):
        return list(schema.values())
    return schema if isinstance(schema, list) else []


def _text(schema: Any, name: str) -> str:
    value = schema.get(name) if isinstance(schema, dict) else None
    return value if isinstance(value, str) else ""


def _item_keywords(schema: Mapping[str, Any]) -> tuple[str, str]:
    if isinstance(schema.get("items"), list):
        return "items", "additionalItems"
    return "prefixItems", "items"


def _without_endless(schema: Any, finite: _Finite) -> Any:
    if not isinstance(schema, dict):
        return schema

    def part(value: Any, *, optional: bool) -> Any:
        return False if optional and not finite.has(value) else _without_endless(value, finite)

    changed = dict(schema)
    required = _list(schema, "required")
    for name in PARTS:
        if isinstance(schema.get(name), dict):
            are_properties = name in ("properties", "patternProperties")
            changed[name] = {
                key: part(each, optional=are_properties and key not in required)
                for key, each in schema[name].items()
            }
    for name in SINGLE:
        if isinstance(schema.get(name), dict):
            changed[name] = part(schema[name], optional=name in OPTIONAL)
    for name in LISTS:
        if isinstance(schema.get(name), list):
            are_choices = name in ("anyOf", "oneOf")
            parts = [part(each, optional=are_choices) for each in schema[name]]
            kept = [each for each in parts if each is not False or not are_choices]
            changed[name] = kept or [False]
    first, rest = _item_keywords(schema)
    endless = (i for i, each in enumerate(_list(schema, first)) if not finite.has(each))
    if (end := next(endless, None)) is not None:
        changed |= {first: changed[first][:end], rest: False}
    return changed


def _with_names_of_patterns(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_names_of_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    without_schemas = ("enum", "const", "default", "examples")
    changed = {
        key: each if key in without_schemas else _with_names_of_patterns(each)
        for key, each in schema.items()
    }
    patterns = _dict(changed, "patternProperties")
    names_of = {pattern: names for pattern in patterns if (names := _names(pattern)) is not None}
    if not names_of:
        return changed
    properties = dict(_dict(changed, "properties"))
    for pattern, names in names_of.items():
        part = patterns[pattern]
        for name in names:  # A value must also follow the schema that its name has already.
            before = properties.get(name, part)
            properties[name] = part if before == part else {"allOf": [before, part]}
    left = {pattern: part for pattern, part in patterns.items() if pattern not in names_of}
    return changed | {"properties": properties, "patternProperties": left}


@lru_cache(1024)
def _names(pattern: str) -> list[str] | None:
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    if matcher.is_error():
        return [] if "Regex is empty" in matcher.get_error() else None
    names: list[str] = []
    beginnings = [(matcher, b"")]  # of names, all of the same length
    for _ in range(MAX_NAME_BYTES):
        longer: list[tuple[Any, bytes]] = []
        for matcher, text in beginnings:
            if matcher.is_accepting():
                names.append(json.loads(text))
            for byte in _allowed_bytes(matcher):
                if len(names) + len(longer) == MAX_NAMES:  # Each beginning is that of another name.
                    return None
                longer.append((matcher.deep_copy(), text + bytes([byte])))
                longer[-1][0].consume_token(byte)
        beginnings = longer
    return None if beginnings else names


@cache
def _byte_tokenizer() -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _allowed_bytes(matcher: Any) -> list[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return [byte for byte in range(256) if mask >> byte & 1]


def _refs(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for part in _parts(schema):
        yield from _refs(part)


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    return value if isinstance(value := schema.get(name), list) else []


def _dict(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    return value if isinstance(value := schema.get(name), dict) else {}
