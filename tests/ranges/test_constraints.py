"""constraints.txt pins every requirement of pyproject.toml, to a version in its range."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pass_runtime.packages import PACKAGES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHOSEN_BY_USERS = "tensorrt-cu13"
"""From NVIDIA's own index; not part of any test."""

SAFE_FROM_THE_NEWEST = "jinja2"
"""Its lower bound is the newest version, because templates can leave the sandbox of older ones."""

REQUIREMENTS = sorted(
    {
        line
        for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
        for line in group
    }
)


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    found = {canonicalize_name(name): version for name, version in pairs}
    assert len(found) == len(pairs)
    return found


@pytest.mark.parametrize("line", REQUIREMENTS)
def test_every_requirement_is_pinned_inside_its_range(line: str):
    requirement = Requirement(line)
    name = canonicalize_name(requirement.name)
    if name not in (canonicalize_name(PROJECT["name"]), CHOSEN_BY_USERS):
        assert constraints()[name] in requirement.specifier


@pytest.mark.parametrize(
    "line", [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cpu"]]
)
def test_the_runtime_pins_no_version(line: str):
    """It has a lower bound, which scripts/test.sh ranges installs, and allows newer versions."""
    specifiers = Requirement(line).specifier
    assert {found.operator for found in specifiers} <= {">=", "<"}
    (least,) = (found.version for found in specifiers if found.operator == ">=")
    name = canonicalize_name(Requirement(line).name)
    assert (least == constraints()[name]) == (name == SAFE_FROM_THE_NEWEST)


def test_only_cpu_and_gpu_bring_an_onnxruntime():
    """Both packages write the same files. onnxruntime-genai is a package of its own."""
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    found = {name: [Requirement(line).name for line in lines] for name, lines in groups.items()}
    names = {name: [each for each in lines if each in PACKAGES] for name, lines in found.items()}
    assert {name: lines for name, lines in names.items() if lines} == {
        "cpu": ["onnxruntime"],
        "gpu": ["onnxruntime-gpu"],
    }
