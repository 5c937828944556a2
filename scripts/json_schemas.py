"""Writes JSON for the schemas of tests/parity/json_schemas.jsonl, and counts what is valid where the text ends.

    python scripts/json_schemas.py BUNDLE [--tokens 300] [--temperature 0.8] [--limit N]

Exit status 1 if a text that ended is not valid by jsonschema, formats included.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click
from jsonschema import Draft202012Validator, FormatChecker

from pass_runtime import Constraint, GenerateOptions, PassError, SamplingParams, load

SCHEMAS = Path(__file__).resolve().parents[1] / "tests/parity/json_schemas.jsonl"


def problem(schema: dict[str, Any], text: str) -> str | None:
    """Why `text` is not JSON of `schema`; None where it is."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    errors = list(Draft202012Validator(schema, format_checker=FormatChecker()).iter_errors(value))
    return errors[0].message if errors else None


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True))
@click.option("--tokens", default=300, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--limit", type=int, help="Only so many schemas.")
def main(bundle: Path, tokens: int, temperature: float, limit: int | None) -> None:
    """Count the valid texts."""
    counts = Counter[str]()
    with load(bundle, "cpu") as session:
        for line in SCHEMAS.read_text(encoding="utf-8").splitlines()[:limit]:
            case = json.loads(line)
            options = GenerateOptions(
                tokens, SamplingParams(temperature, seed=1), constraint=Constraint(json_schema=case["schema"])
            )
            try:
                generation = session.chat([{"role": "user", "content": case["prompt"]}], options).result()
            except PassError as error:
                counts["refused"] += 1
                click.echo(f"refused: {case['prompt']}: {error}")
                continue
            if generation.finish_reason != "stop":
                counts["cut off"] += 1
                continue
            why = problem(case["schema"], generation.text)
            counts["valid" if why is None else "not valid"] += 1
            if why is not None:
                click.echo(f"{case['prompt']}: {why}: {generation.text[:200]}")
    click.echo(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    if counts["not valid"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
