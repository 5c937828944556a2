"""Reads the manifest of a bundle, and refuses one that this version cannot use, in one line that says why.

The metadata in trunk.onnx must equal the manifest, so that the manifest of another model is refused at load.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from pass_runtime.bundle import noise
from pass_runtime.bundle.consistency import inconsistency
from pass_runtime.bundle.manifest import FILE_NAME, VERSION, Manifest, ModelInfo, NoiseInfo
from pass_runtime.bundle.sampling import Rule
from pass_runtime.errors import PassError

METADATA = "pass_toolkit"
"""Key in the graph's metadata; the value is JSON."""
FIELDS = ("dtype", "weights", "vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "max_capacity")


def metadata(model: ModelInfo, lookahead: int, rule: Rule) -> dict[str, str | int]:
    """The model's numbers by the names of their manifest fields, with the look-ahead length and the rule."""
    return {f"model.{name}": getattr(model, name) for name in FIELDS} | {"lookahead.length": lookahead, "rule": rule}


def trunk_metadata(manifest: Manifest) -> dict[str, str | int]:
    """The metadata that the trunk of this bundle must have."""
    return metadata(manifest.model, manifest.lookahead.length, manifest.rule)


def read_manifest(bundle: Path) -> Manifest:
    """Parse and validate `bundle`/pass_config.json."""
    path = bundle / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise PassError(f"{bundle} is not a bundle: it has no {FILE_NAME} (make one with pass-export)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PassError(f"cannot read {path}: {error}") from None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise PassError(f"{path}: {_first_problem(error)}") from None
    expected = NoiseInfo(scheme=noise.SCHEME, members=noise.BLOCK_SIZE, row=noise.ROW, bits=noise.BITS)
    if manifest.noise != expected:
        raise PassError(
            f"{path}: noise scheme {manifest.noise.scheme!r} is not this version's {noise.SCHEME!r}; export again"
        )
    if (problem := inconsistency(manifest)) is not None:
        raise PassError(f"{path} contradicts itself: {problem}; export the bundle again")
    return manifest


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    where = " ".join(".".join(str(part) for part in problem["loc"]).split())
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r} (made by a newer pass-export? upgrade, or export again)"
    if where == "version" and problem["type"] != "missing":
        return f"manifest version {problem['input']!r} is not {VERSION} (export again with this version)"
    more = f", and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{where or 'file'}: {problem['msg']}{more}"
