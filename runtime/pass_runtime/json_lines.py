"""JSON as commands read and write it: whole values, and the lines of .jsonl files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from pass_runtime.errors import PassError


def to_json(value: object, indent: int | None = None) -> str:
    """PassError where `value` has numbers that JSON lacks: infinity, NaN, integers too long for Python to print."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError as error:
        raise PassError(f"JSON cannot hold a number that is in it: {error}") from None


@dataclass(frozen=True)
class Line:
    """A line of a .jsonl file that is not blank. number: its number in the file, from 1, blank lines counted."""

    number: int
    text: str

    def object(self) -> dict[str, Any]:
        """The JSON object in the line; PassError where it holds anything else."""
        try:
            value = from_json(self.text, allow_inf_nan=False)
        except ValueError as error:
            raise PassError(f"not JSON: {error}") from None
        try:
            to_json(value)  # 1e999 is read as infinity, which no result could repeat
        except PassError as error:
            raise PassError(f"{error}; write it as a string") from None
        if not isinstance(value, dict):
            raise PassError("not a JSON object")
        return value


def lines_of(text: str) -> list[Line]:
    """The lines of a .jsonl file's text, without blank ones."""
    return [Line(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
