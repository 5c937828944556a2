"""A pytest plugin in place of tests/conftest.py: its fixtures are the bundles of record.py, and
files that need the exporter are left out."""

from __future__ import annotations

import functools
import re
from importlib.metadata import version
from pathlib import Path

import click.testing
import pytest
from decodings import directory

NEEDS_EXPORTER = re.compile(
    r"^(from|import) (pass_exporter|pass_trainer|torch|transformers|onnx|onnx_ir"
    r"|engine_sessions|aliasing|tail_runs)\b",
    re.MULTILINE,
)

# Later versions of click always keep stderr apart, and have no such argument.
if version("click").startswith("8.1."):
    click.testing.CliRunner = functools.partial(click.testing.CliRunner, mix_stderr=False)  # type: ignore[misc,assignment]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """False would overrule --ignore."""
    if collection_path.suffix != ".py":
        return None
    return NEEDS_EXPORTER.search(collection_path.read_text(encoding="utf-8")) is not None or None


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    pytest.skip("needs the exporter")


@pytest.fixture(scope="session")
def in_format() -> Path:
    pytest.skip("needs the exporter")


@pytest.fixture(scope="session")
def rejection_bundle() -> Path:
    pytest.skip("needs the exporter")


@pytest.fixture(scope="session")
def tiny_bundle() -> Path:
    return directory() / "tiny"


@pytest.fixture(scope="session")
def random_bundle() -> Path:
    return directory() / "random"


@pytest.fixture(scope="session")
def adapter_bundle() -> Path:
    return directory() / "adapter"


@pytest.fixture(scope="session")
def head_bundle() -> Path:
    return directory() / "head"
