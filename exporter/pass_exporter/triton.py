"""pass-export triton: a bundle as a model of Triton's Python backend, in a model repository."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pass_exporter.staging import staged_directory
from pass_runtime.backends.open import check_wanted
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_server.triton.config import KINDS, Field, inputs, make_settings, outputs

COPY = "1/bundle"
"""The place of a copied bundle in its model's directory."""
MODEL = '''\
"""Written by `pass-export triton`: everything is in pass_server, which has to be installed where Triton runs."""

import triton_python_backend_utils

from pass_server.triton.model import Model


class TritonPythonModel(Model):
    pb_utils = triton_python_backend_utils
'''


NO_CACHE = """\
A file of this name keeps Python from writing a directory of this name. Triton takes any change beside model.py for a
new version of the model, and would load it a second time.
"""


@dataclass(frozen=True)
class RepositoryConfig:
    """The options of pass-export triton. output: the repository, to which a model is added. tokens: the model takes and
    returns token ids, not text. copy: the bundle is copied into the model, not referred to. instances: processes, each
    with its own session. The others are None for the model's default, see `pass_server.triton.config`.
    """

    bundle: Path
    output: Path
    served_model_name: str | None = None
    tokens: bool = False
    copy: bool = False
    instances: int = 1
    force: bool = False
    device: str = "auto"
    max_batch_size: int | None = None
    threads: int | None = None
    capacity: int | None = None
    max_queue: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    request_seconds: float | None = None
    drain_seconds: float | None = None
    reuse_prefix: bool | None = None
    weight_cache: bool | None = None
    prefix_cache: bool | None = None
    speculative_max_concurrency: int | None = None
    logprobs_mode: str | None = None

    @property
    def chosen(self) -> dict[str, str | int | float | bool]:
        """The parameters that are not None."""
        return {name: value for name in KINDS if (value := getattr(self, name)) is not None}


def write_model(config: RepositoryConfig) -> Path:
    """Add a model to a repository, completely or not at all; returns its directory."""
    manifest = read_manifest(config.bundle)
    verify_files(config.bundle, manifest, hashes=False)
    name = config.served_model_name or _name(manifest.model.name, tokens=config.tokens)
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise PassError(f"{name!r} cannot be a model's name: use letters, digits, '-', '_' and '.'")
    if config.instances < 1:
        raise PassError(f"instances must be at least 1, not {config.instances}")
    check_wanted(config.bundle, manifest, config.device, config.capacity)
    make_settings(COPY, tokens=config.tokens, **config.chosen)
    _check_repository(config.output)
    model = config.output / name
    another = "another --served-model-name for one beside it"
    kind = {"kind": "model of Triton", "mark": "config.pbtxt"}
    with staged_directory(model, force=config.force, elsewhere=another, **kind) as directory:
        (directory / "1").mkdir()
        if config.copy:
            shutil.copytree(config.bundle, directory / COPY)
        (directory / "1" / "model.py").write_text(MODEL, encoding="utf-8")
        (directory / "1" / "__pycache__").write_text(NO_CACHE, encoding="utf-8")
        (directory / "config.pbtxt").write_text(
            config_pbtxt(name, config), encoding="utf-8"
        )  # last: it makes the directory a model
    return model


def config_pbtxt(name: str, config: RepositoryConfig) -> str:
    """The model's configuration. Triton does not batch requests, because the session does."""
    bundle = COPY if config.copy else str(config.bundle.resolve())
    values = {"bundle": bundle, "tokens": config.tokens} | config.chosen
    lines = [
        f"name: {_text(name)}",
        'backend: "python"',
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
        *(f"input {{ {_field(field)}{_optional(field)} }}" for field in inputs(tokens=config.tokens)),
        *(f"output {{ {_field(field)} }}" for field in outputs(tokens=config.tokens)),
        f"instance_group {{ count: {config.instances} kind: {_kind(config.device)} }}",
        *(f"parameters {{ key: {_text(key)} value {{ string_value: {_value(values[key])} }} }}" for key in values),
    ]
    return "\n".join(lines) + "\n"


def _name(model: str, *, tokens: bool) -> str:
    """The name of the model if --served-model-name does not give one."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", model).strip("-.") + ("-tokens" if tokens else "")


def _check_repository(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise PassError(f"{path} is not a directory; name a model repository, or one to be")
    if (path / "config.pbtxt").exists():
        raise PassError(f"{path} is a model of a repository; name the repository, with --output {path.parent}")


def _kind(device: str) -> str:
    """The kind of the instances. KIND_MODEL leaves the choice of a device to the session."""
    return {"cpu": "KIND_CPU", "auto": "KIND_MODEL"}.get(device, "KIND_GPU")


def _field(field: Field) -> str:
    return f'name: "{field.name}" data_type: TYPE_{field.dtype} dims: [ {field.dims} ]'


def _optional(field: Field) -> str:
    return " optional: true" if field.optional else ""


def _value(value: object) -> str:
    return _text(str(value).lower() if isinstance(value, bool) else str(value))


def _text(text: str) -> str:
    """A string in protobuf's text format: as in JSON, but characters beyond ASCII are not escaped."""
    return json.dumps(text, ensure_ascii=False)
