"""Reads the manifest of a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pass_runtime.bundle import noise
from pass_runtime.bundle.manifest import (
    FILE_NAME,
    MANIFEST_VERSION,
    Manifest,
    NoiseInfo,
    digest_of,
)
from pass_runtime.errors import PassError


def read_manifest(bundle: Path) -> Manifest:
    """Read and check `bundle`/pass_config.json. Raises PassError if it cannot be used."""
    path = bundle / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if bundle.suffix == ".gguf" or (bundle / "config.json").is_file():
            raise PassError(
                f"{bundle} is a model, not a bundle: make a bundle with `pass-export "
                f"--model {bundle}`"
            ) from None
        raise PassError(
            f"{bundle} is not a bundle: it has no {FILE_NAME} (make one with pass-export)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PassError(f"cannot read {path}: {error}") from None
    try:
        manifest = Manifest.model_validate_json(text)
        document: dict[str, Any] = json.loads(text)
    except ValidationError as error:
        raise PassError(f"{path}: {_first_problem(error)}") from None
    except ValueError as error:  # pydantic's JSON has numbers that json refuses
        raise PassError(f"{path}: {error}") from None
    if manifest.noise != NoiseInfo.of_this_version():
        raise PassError(
            f"{path}: noise scheme {manifest.noise.scheme!r} or its table sizes are not this "
            f"version's {noise.SCHEME!r}; export the bundle again"
        )
    if digest_of(document) != manifest.digest:
        raise PassError(
            f"{path} was edited after the export (its digest differs): export the bundle again"
        )
    return manifest


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    key = " ".join(".".join(str(part) for part in problem["loc"]).split())
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r} (made by a newer pass-export? upgrade, or export again)"
    if key == "version" and problem["type"] != "missing":
        return (
            f"manifest version {problem['input']!r} is not {MANIFEST_VERSION}; export the bundle "
            "again"
        )
    others = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{key or 'file'}: {problem['msg']}{others}"
