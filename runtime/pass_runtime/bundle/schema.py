"""Writes the JSON schema of the manifest, for readers in other languages."""

from __future__ import annotations

import json
from pathlib import Path

from pass_runtime.bundle.manifest import Manifest
from pass_runtime.files import write_whole

SCHEMA_FILE = Path(__file__).with_name("pass_config.schema.json")


def schema_text() -> str:
    """Return what SCHEMA_FILE must contain."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Manifest.model_json_schema(),
    }
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    write_whole(SCHEMA_FILE, schema_text())
