"""Copies of bundles whose manifest or files a test changes, paths within JSON documents, and the
messages of errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.errors import PassError


def real_document(bundle: Path) -> dict:
    """Return the JSON of a bundle's manifest."""
    return json.loads((bundle / FILE_NAME).read_text(encoding="utf-8"))


def named_bundle(request: pytest.FixtureRequest) -> Path:
    """Return the bundle of a fixture's parameter: the name of another fixture (`..._bundle`), or
    the name of a format, for a tiny bundle in this format."""
    if request.param.endswith("bundle"):
        return request.getfixturevalue(request.param)
    return request.getfixturevalue("in_format")(request.param)


def linked(bundle: Path, target: Path) -> Path:
    """Fill the folder `target` with links to the files of `bundle`, so that a test may `replace`
    some of them. Return `target`."""
    for path in bundle.iterdir():
        (target / path.name).symlink_to(path)
    return target


def replace(path: Path, data: bytes) -> None:
    """Put a file in the place of the file or link at `path`."""
    path.unlink()
    path.write_bytes(data)


def write_manifest(bundle: Path, document: dict) -> None:
    """Give a bundle of links (see `linked`) this manifest."""
    replace(bundle / FILE_NAME, json.dumps(document).encode())


def refusal(call, *args, **options) -> str:
    """Return the message of the PassError that `call` must raise, and check that it is one line."""
    with pytest.raises(PassError) as error:
        call(*args, **options)
    message = str(error.value)
    assert message == message.strip() != ""
    assert len(message.splitlines()) == 1, message
    return message


def one_of_each_kind(all_paths: list[tuple]) -> list[tuple]:
    """Return one of all paths that differ in indices of lists alone."""

    def kind(path: tuple) -> tuple:
        return tuple("*" if isinstance(key, int) else key for key in path)

    return list({kind(path): path for path in all_paths}.values())


def at(document, path: tuple):
    """Return the value at a path, which is a tuple of keys and list indices."""
    for key in path:
        document = document[key]
    return document


def paths(node, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values of a document that are neither objects nor lists, each with
    `path` before it."""
    if not isinstance(node, (dict, list)):
        return [path]
    children = node.items() if isinstance(node, dict) else enumerate(node)
    return [below for key, child in children for below in paths(child, (*path, key))]
