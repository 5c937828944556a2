"""Bundles whose manifest or files a test changes, and the errors that refuse them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.errors import PassError


def real_document(bundle: Path) -> dict:
    """The manifest as JSON; tests change copies."""
    return json.loads((bundle / FILE_NAME).read_text(encoding="utf-8"))


def named_bundle(request: pytest.FixtureRequest) -> Path:
    """The bundle of the fixture `request.param`, or the tiny one in that format."""
    if request.param.endswith("bundle"):
        return request.getfixturevalue(request.param)
    return request.getfixturevalue("in_format")(request.param)


def linked(bundle: Path, target: Path) -> Path:
    """Make `target` a bundle of links to the files of `bundle`, which a test may replace."""
    for path in bundle.iterdir():
        (target / path.name).symlink_to(path)
    return target


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def refusal(call, *args, **options) -> str:
    """The message of the PassError that `call` must raise: one line."""
    with pytest.raises(PassError) as error:
        call(*args, **options)
    message = str(error.value)
    assert message == message.strip() != ""
    assert len(message.splitlines()) == 1, message
    return message


def one_of_each_kind(found: list[tuple]) -> list[tuple]:
    """Paths that differ in more than indices of lists."""
    kinds = {tuple("*" if isinstance(key, int) else key for key in path): path for path in found}
    return list(kinds.values())


def at(document, path: tuple):
    """The value at a path: its keys and indices one after another."""
    for key in path:
        document = document[key]
    return document


def paths(node, path: tuple = ()) -> list[tuple]:
    """Paths of all values in a document that are neither objects nor lists."""
    if not isinstance(node, (dict, list)):
        return [path]
    children = node.items() if isinstance(node, dict) else enumerate(node)
    return [found for key, child in children for found in paths(child, (*path, key))]
