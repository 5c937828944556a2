"""The constraint of a request: JSON, a regular expression, choices or a grammar for its text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pass_runtime.bundle.option import Texts, option, options_class, options_of, short_repr
from pass_runtime.errors import PassError

JSON_FORM: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: a model could write other white space for ever."""
MAX_GRAMMAR_BYTES = 1 << 20
"""The most bytes of a grammar, a schema, a regular expression, or all choices together."""


@options_class
class Constraint:
    """What the whole text must match. Exactly one of the fields is set: json_schema, text or what
    `json.loads` makes of it; json_object; regex, as in Rust's crate regex; choice; or grammar, in
    llguidance's Lark. Whether it is valid is checked when a request begins."""

    json_schema: Any = option(None, "Write JSON that is valid by the JSON schema in this file.")
    json_object: bool = option(False, "Write a JSON object.")
    regex: str | None = option(None, "Write text that matches this regular expression as a whole.")
    choice: Texts = option((), "Write one of these texts.")
    grammar: str | None = option(None, "Write text that the Lark grammar in this file allows.")

    def __post_init__(self) -> None:
        if not all(self.choice):
            raise PassError("every choice must be a string that is not empty")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _json_text(self.json_schema))
        given = [name for name, is_set in self._fields_set.items() if is_set]
        if len(given) != 1:
            raise PassError(
                f"a constraint has exactly one of {', '.join(self._fields_set)}; this one has "
                f"{' and '.join(given) or 'none'}"
            )
        parts = (self.regex or "", self.grammar or "", *self.choice, self.schema)
        try:
            size = sum(len(part.encode()) for part in parts)
        except UnicodeEncodeError:  # a lone surrogate
            raise PassError(f"{given[0]} is not valid Unicode text") from None
        if size > MAX_GRAMMAR_BYTES:
            raise PassError(f"{given[0]} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed")

    @property
    def kind(self) -> str:
        return next(name for name, is_set in self._fields_set.items() if is_set)

    @property
    def _fields_set(self) -> Mapping[str, bool]:
        options = options_of(Constraint).values()
        return {each.name: getattr(self, each.name) != each.default for each in options}

    @property
    def schema(self) -> str:
        return self.json_schema if isinstance(self.json_schema, str) else ""

    def lark(self, name: str) -> str:
        """Return rules for a grammar in llguidance's Lark, of which `name` is the constraint."""
        if self.json_object or self.schema:
            schema = json.loads(self.schema or '{"type": "object"}')
            if isinstance(schema, bool):
                schema = {} if schema else {"enum": []}  # as an object, for "x-guidance"
            form = {**schema, "x-guidance": JSON_FORM}
            return f"{name}: %json {json.dumps(form, ensure_ascii=False)}"
        if self.regex is not None:
            return f"{name}: {_lark_regex(self.regex)}"
        if self.choice:  # As one terminal: with a rule for every choice it would be too complex.
            written = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in self.choice)
            return f"{name}: {name.upper()}\n{name.upper()}: {written}"
        return f"{name}: %lark {{\n{self.grammar}\n}}"


def _lark_regex(pattern: str) -> str:
    written, escaped = "", False
    for character in pattern:
        if character == "/" and not escaped:
            written += "\\/"
        else:
            written += "\\n" if character == "\n" else character
        escaped = character == "\\" and not escaped
    return f"/(?:{written})/"


def _json_text(schema: object) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        written = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PassError(f"the JSON schema is not valid JSON: {error}") from error
    if not isinstance(value, Mapping | bool):
        raise PassError(
            f"a JSON schema must be a JSON object, true or false, not {short_repr(value)}"
        )
    return written
