"""Writes what is made of the sampling fields (`SamplingParams`): a header of the C++ runtime and a
table of docs/sampling.md.

    python scripts/field_tables.py
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from pass_runtime.bundle.option import Option, options_of
from pass_runtime.bundle.sampling import MAX_BIASES, MAX_LOGPROBS, SamplingParams
from pass_runtime.options import MAX_BAD_WORDS, MAX_STOP_BYTES, MAX_STOPS

ROOT = Path(__file__).parents[1]
HEADER = ROOT / "runtime" / "cpp" / "include" / "pass" / "sampling_fields.h"
DOCS = ROOT / "docs" / "sampling.md"
DOCS_TABLE = re.compile(r"(?<=<!-- scripts/field_tables.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
FIELDS = options_of(SamplingParams)
NUMBERS = {name: field for name, field in FIELDS.items() if name not in ("seed", "logit_bias")}
MACROS = {
    "TEMPERATURE_FIELD": [each for each in NUMBERS.values() if each.tail == "sample"],
    "TRUNCATION_FIELDS": [each for each in NUMBERS.values() if each.tail == "truncated"],
    "PENALTY_FIELDS": [each for each in NUMBERS.values() if not each.tail],
    "SEED_FIELD": [FIELDS["seed"]],
    "LOGIT_BIAS_FIELD": [FIELDS["logit_bias"]],
}
TEMPLATE = """\
// The sampling fields. Written by scripts/field_tables.py from SamplingParams; do not edit.
// clang-format off
#pragma once

#include <float.h>
#include <stdint.h>

// FIELD(type, name, default, min, max, flag, allowed, help)
{macros}

#define PASS_TAIL_FIELDS(FIELD) PASS_TEMPERATURE_FIELD(FIELD) PASS_TRUNCATION_FIELDS(FIELD)
#define PASS_SAMPLING_FIELDS(FIELD) PASS_TAIL_FIELDS(FIELD) PASS_PENALTY_FIELDS(FIELD)

#define PASS_MAX_BIASES {biases}
#define PASS_MAX_LOGPROBS {logprobs}
#define PASS_MAX_BAD_WORDS {bad_words}
#define PASS_MAX_STOPS {stops}
#define PASS_MAX_STOP_BYTES {stop_bytes}
"""


def c_row(field: Option) -> str:
    """Return the macro call of a field."""
    default, low, high = field.default or 0, field.bounds["ge"], field.bounds.get("le")
    if field.name == "seed":
        number, values = "uint64_t", [0, 0, "UINT64_MAX"]
    elif field.type is int:
        number, values = "int64_t", [default, low, high]
    else:
        most = "DBL_MAX" if high is None else float(high)
        number, values = "double", [float(default), float(low), most]
    arguments = (
        number,
        field.name,
        *map(str, values),
        *map(json.dumps, (field.flag, field.allowed)),
    )
    help_lines = map(json.dumps, textwrap.wrap(field.help, 80, drop_whitespace=False))
    return " \\\n          ".join([f"    FIELD({', '.join(arguments)},", *help_lines]) + ")"


def header() -> str:
    """Return the text of the C header."""
    macros = (
        f"#define PASS_{name}(FIELD) \\\n" + " \\\n".join(map(c_row, fields))
        for name, fields in MACROS.items()
    )
    return TEMPLATE.format(
        macros="\n\n".join(macros),
        biases=MAX_BIASES,
        logprobs=MAX_LOGPROBS,
        bad_words=MAX_BAD_WORDS,
        stops=MAX_STOPS,
        stop_bytes=MAX_STOP_BYTES,
    )


def docs(text: str) -> str:
    """Return the text of docs/sampling.md with the present table."""
    rows = ["| field | flag | default | values | |", "|---|---|---|---|---|"]
    for field in FIELDS.values():
        default = field.if_none or f"{field.default or 0:g}" if field.shape == "one" else "none"
        cells = (f"`{field.name}`", f"`{field.flag}`", default, field.allowed, field.help)
        rows.append(f"| {' | '.join(cells)} |")
    return DOCS_TABLE.sub("\n".join(rows) + "\n", text)


def main() -> None:
    HEADER.write_text(header(), encoding="utf-8")
    DOCS.write_text(docs(DOCS.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
