"""`pass-export triton`: adds a bundle to a model repository of the Triton server, for its Python
backend."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

from pass_exporter.staging import staged_directory
from pass_runtime.backends.open import check_load_options
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.option import option, options_class
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_server.triton.config import TensorSpec, inputs, make_settings, outputs

BUNDLE_COPY = "1/bundle"
"""Where a copied bundle lies in its model's directory."""
MODEL_PY = '''\
"""Written by `pass-export triton`. Its code is pass_server, which Triton's Python must have."""

import triton_python_backend_utils

from pass_server.triton.model import Model


class TritonPythonModel(Model):
    pb_utils = triton_python_backend_utils
'''
PYCACHE_PLACEHOLDER = """\
This file keeps Python from creating a directory __pycache__ here. Triton would take the new
directory for a change of the model, and load the model a second time.
"""


@options_class
class RepositoryConfig:
    """The options of pass-export triton. output: the repository. tokens: token ids in place of
    text. copy: the bundle into the model's directory. parameters: values of config.pbtxt, by the
    names in `pass_server.triton.config.PARAMETERS`."""

    label_prefix: ClassVar[str] = "--"
    bundle: Path
    output: Path
    served_model_name: str | None = option(
        None,
        "The model's name for clients.",
        if_none="the bundle's name, with -tokens appended for --tokens",
    )
    tokens: bool = False
    copy: bool = False
    instances: int = option(1, "Processes, each with its own session.", ge=1)
    force: bool = option(False, "Replace an existing model with that name.")
    parameters: Mapping[str, Any] = field(default_factory=dict)


def write_model(config: RepositoryConfig) -> Path:
    """Add the bundle to the repository atomically. Return the new model's directory. Raises
    PassError if an option is invalid, the bundle cannot be read, or the model exists and
    `config.force` is False."""
    manifest = read_manifest(config.bundle)
    verify_files(config.bundle, manifest, hashes=False)
    name = config.served_model_name or re.sub(r"[^A-Za-z0-9_.-]+", "-", manifest.model.name).strip(
        "-."
    ) + ("-tokens" if config.tokens else "")
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise PassError(f"{name!r} cannot be a model's name: use letters, digits, '-', '_' and '.'")
    # Checks the parameters; the path of the bundle does not matter here.
    settings = make_settings(BUNDLE_COPY, tokens=config.tokens, **config.parameters)
    check_load_options(config.bundle, manifest, settings.load.device, settings.load.capacity)
    _check_repository(config.output)
    model = config.output / name
    with staged_directory(
        model,
        force=config.force,
        kind="model of Triton",
        marker_file="config.pbtxt",
        alternative="another --served-model-name",
    ) as directory:
        (directory / "1").mkdir()
        if config.copy:
            shutil.copytree(config.bundle, directory / BUNDLE_COPY)
        (directory / "1" / "model.py").write_text(MODEL_PY, encoding="utf-8")
        (directory / "1" / "__pycache__").write_text(PYCACHE_PLACEHOLDER, encoding="utf-8")
        # This file is last, because Triton recognises a model by it.
        (directory / "config.pbtxt").write_text(config_pbtxt(name, config), encoding="utf-8")
    return model


def config_pbtxt(name: str, config: RepositoryConfig) -> str:
    """Return config.pbtxt, in protobuf's text format. A max_batch_size of 0 switches Triton's own
    batching off: the session batches."""
    bundle = BUNDLE_COPY if config.copy else str(config.bundle.resolve())
    device = config.parameters.get("device", "auto")
    parameters = {"bundle": bundle, "tokens": config.tokens, **config.parameters}
    lines = [
        f"name: {_quoted(name)}",
        'backend: "python"',
        "max_batch_size: 0",
        "model_transaction_policy { decoupled: true }",
        *(
            f"input {{ {_tensor(spec)}{' optional: true' * spec.optional} }}"
            for spec in inputs(tokens=config.tokens)
        ),
        *(f"output {{ {_tensor(spec)} }}" for spec in outputs(tokens=config.tokens)),
        f"instance_group {{ count: {config.instances} kind: {_instance_kind(device)} }}",
        *(
            f"parameters {{ key: {_quoted(key)} value {{ string_value: {_value(value)} }} }}"
            for key, value in parameters.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _check_repository(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise PassError(
            f"{path} is not a directory; give a directory, which is created if it does not exist"
        )
    if (path / "config.pbtxt").exists():
        raise PassError(
            f"{path} is a model of a repository; name the repository, with --output {path.parent}"
        )


def _instance_kind(device: str) -> str:
    """KIND_MODEL leaves the choice to the session."""
    return {"cpu": "KIND_CPU", "auto": "KIND_MODEL"}.get(device, "KIND_GPU")


def _tensor(spec: TensorSpec) -> str:
    return f'name: "{spec.name}" data_type: TYPE_{spec.dtype} dims: [ {spec.dims} ]'


def _value(value: object) -> str:
    return _quoted(str(value).lower() if isinstance(value, bool) else str(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
