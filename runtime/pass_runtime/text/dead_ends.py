"""Takes dead ends out of JSON schemas: what a text may begin with, but never end.

llguidance looks at a part of a schema when the text gets there. So it lets a text begin an optional
property, an item or an alternative that has no finite value (a loop of `$ref`), and a comma before
properties of a pattern whose only names are used already. Here such parts become `false`, and
patterns with few names become properties.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

MAX_NAMES, MAX_NAME_BYTES = 64, 256
"""A pattern with more names, or longer ones, stays a pattern."""
MAX_STEPS = 100_000
"""The most looks at parts of a schema, as schemas can refer to one another without bound."""
PARTS = ("properties", "patternProperties", "$defs", "definitions")
OPTIONAL = ("additionalProperties", "additionalItems", "items")
"""Keywords whose schema no value need meet."""
SINGLE = (*OPTIONAL, "not", "if", "then", "else", "contains", "propertyNames")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")


def without_dead_ends(schema: Any) -> Any:
    """A schema with the same finite values; False if there are none. It is not changed itself. A
    schema that takes more than MAX_STEPS, or is nested too deep, is returned as it is: llguidance
    has limits, too."""
    try:
        found = _with_names_of_patterns(schema)
        finite = _Finite(found)
        if not finite.endless:
            return found
        return _without_endless(found, finite) if finite.has(found) else False
    except (_TooMuch, RecursionError):
        return schema


class _TooMuch(Exception):
    """More than MAX_STEPS."""


class _Finite:
    """Which schemas have a finite value, by the `$ref` targets that have one. endless: whether a
    target has none."""

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
        has_patterns = bool(schema.get("patternProperties"))
        other = has_patterns or schema.get("additionalProperties", True)
        return all(
            self.has(properties.get(name, other))
            for name in _list(schema, "required")
            if isinstance(name, str)
        )

    def _has_array(self, schema: Mapping[str, Any]) -> bool:
        least, (first_name, rest_name) = schema.get("minItems", 0), _item_keywords(schema)
        if not isinstance(least, int | float) or least <= 0:
            return True
        first = _list(schema, first_name)
        rest = True if least <= len(first) else self.has(schema.get(rest_name, True))
        return rest and all(self.has(each) for each in first[: int(least)])

    def _target(self, ref: str) -> Any:
        """What a `$ref` in this schema leads to; True if it leads elsewhere."""
        base = _text(self._root, "$id")
        url, fragment = urldefrag(urljoin(base, ref))
        found = self._root
        if url != urldefrag(base).url:
            found = _first_part(self._root, lambda part: urljoin(base, _text(part, "$id")) == url)
        begin, *keys = unquote(fragment).split("/")
        if begin:
            found = _first_part(found, lambda part: _text(part, "$anchor") == begin)
        for key in (each.replace("~1", "/").replace("~0", "~") for each in keys):
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict) and key in found:
                found = found[key]
            else:
                return True  # llguidance says what is wrong
        return found


def _first_part(schema: Any, is_it: Callable[[Any], bool]) -> Any:
    """The first part of a schema that is sought; True if there is none."""
    if isinstance(schema, dict) and is_it(schema):
        return schema
    parts = (
        schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    )
    return next((found for part in parts if (found := _first_part(part, is_it)) is not True), True)


def _text(schema: Any, name: str) -> str:
    return found if isinstance(schema, dict) and isinstance(found := schema.get(name), str) else ""


def _item_keywords(schema: Mapping[str, Any]) -> tuple[str, str]:
    """The keywords of an array's first items and of its others, in JSON Schema 2019 or 2020."""
    if isinstance(schema.get("items"), list):
        return "items", "additionalItems"
    return "prefixItems", "items"


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
                key: part(each, optional=of_objects and key not in required)
                for key, each in schema[name].items()
            }
    for name in SINGLE:
        if isinstance(schema.get(name), dict):
            found[name] = part(schema[name], optional=name in OPTIONAL)
    for name in LISTS:
        if isinstance(schema.get(name), list):
            parts = [part(each, optional=name in ("anyOf", "oneOf")) for each in schema[name]]
            found[name] = [
                each for each in parts if each is not False or name not in ("anyOf", "oneOf")
            ] or [False]
    first, rest = _item_keywords(schema)
    endless = (i for i, each in enumerate(_list(schema, first)) if not finite.has(each))
    if (end := next(endless, None)) is not None:
        found |= {first: found[first][:end], rest: False}  # an array ends before it
    return found


def _with_names_of_patterns(schema: Any) -> Any:
    """`schema` with properties in place of `patternProperties` that have few names."""
    if isinstance(schema, list):
        return [_with_names_of_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: each
        if key in ("enum", "const", "default", "examples")
        else _with_names_of_patterns(each)
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


@lru_cache(1024)
def _names(pattern: str) -> list[str] | None:
    """All names that a pattern matches; None if there are more than MAX_NAMES, or a longer one than
    MAX_NAME_BYTES. llguidance itself writes them, byte by byte, so they are those that it would let
    a text have."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    matcher = LLMatcher(_bytes(), grammar, log_level=0)
    if matcher.is_error():
        return [] if "Regex is empty" in matcher.get_error() else None
    found: list[str] = []
    begun = [(matcher, b"")]
    for _ in range(MAX_NAME_BYTES):
        longer: list[tuple[Any, bytes]] = []
        for matcher, text in begun:
            if matcher.is_accepting():
                found.append(json.loads(text))
            for byte in _allowed_bytes(matcher):
                if len(found) + len(longer) == MAX_NAMES:  # every beginning has an end of its own
                    return None
                longer.append((matcher.deep_copy(), text + bytes([byte])))
                longer[-1][0].consume_token(byte)
        begun = longer
    return None if begun else found


@cache
def _bytes() -> Any:
    """A tokenizer whose tokens are the 256 bytes, and one that ends a text."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _allowed_bytes(matcher: Any) -> list[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return [byte for byte in range(256) if mask >> byte & 1]


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
