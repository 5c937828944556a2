"""Bundles that a test damages, and values within JSON documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pass_runtime.bundle.manifest import FILE_NAME, digest_of
from pass_runtime.errors import PassError


def real_document(bundle: Path) -> dict:
    return json.loads((bundle / FILE_NAME).read_text(encoding="utf-8"))


def named_bundle(request: pytest.FixtureRequest) -> Path:
    if request.param.endswith("bundle"):
        return request.getfixturevalue(request.param)
    return request.getfixturevalue("in_format")(request.param)


def linked(bundle: Path, target: Path) -> Path:
    for path in bundle.iterdir():
        (target / path.name).symlink_to(path)
    return target


def replace(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def write_manifest(bundle: Path, document: dict) -> None:
    signed = document | {"digest": digest_of(document)}
    replace(bundle / FILE_NAME, json.dumps(signed).encode())


def refusal(call, *args, **options) -> str:
    with pytest.raises(PassError) as error:
        call(*args, **options)
    message = str(error.value)
    assert message == message.strip() != ""
    assert len(message.splitlines()) == 1, message
    return message


def one_of_each_kind(all_paths: list[tuple]) -> list[tuple]:
    def kind(path: tuple) -> tuple:
        return tuple("*" if isinstance(key, int) else key for key in path)

    return list({kind(path): path for path in all_paths}.values())


def at(document, path: tuple):
    for key in path:
        document = document[key]
    return document


def paths(node, path: tuple = ()) -> list[tuple]:
    """Return the paths of all values that are neither objects nor lists."""
    if not isinstance(node, (dict, list)):
        return [path]
    children = node.items() if isinstance(node, dict) else enumerate(node)
    return [below for key, child in children for below in paths(child, (*path, key))]
