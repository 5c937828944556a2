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
"""Not in constraints.txt: it comes from NVIDIA's own index."""
BOUND_IS_NEWEST = "jinja2"
"""Templates can leave the sandbox of older ones."""
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
    versions = {canonicalize_name(name): version for name, version in pairs}
    assert len(versions) == len(pairs), "a package is listed twice"
    return versions


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
    specifiers = Requirement(line).specifier
    assert {each.operator for each in specifiers} <= {">=", "<"}
    (lower_bound,) = (each.version for each in specifiers if each.operator == ">=")
    name = canonicalize_name(Requirement(line).name)
    assert (lower_bound == constraints()[name]) == (name == BOUND_IS_NEWEST)


def test_only_cpu_and_gpu_bring_an_onnxruntime():
    """They overwrite each other's files."""
    builds = {}
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    for extra, lines in groups.items():
        names = [Requirement(line).name for line in lines]
        if present := [name for name in names if name in PACKAGES]:
            builds[extra] = present
    assert builds == {"cpu": ["onnxruntime"], "gpu": ["onnxruntime-gpu"]}
