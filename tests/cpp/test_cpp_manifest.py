"""The C++ runtime refuses the damaged bundles that the Python runtime refuses, in one line. What a
hostile manifest may do is in runtime/cpp/tests/manifest_test.cpp."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cpp_programs import program_at
from manifests import linked, real_document

from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import FILE_NAME, digest_of
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError


@pytest.fixture(scope="session")
def program() -> Path:
    return program_at("check_bundles")


def cpp_errors(program: Path, bundles: list[Path], hashes: bool = True) -> list[str | None]:
    """Return the C++ runtime's error for each bundle; None if it accepts the bundle."""
    lines = "".join(f"{path}{'' if hashes else chr(9) + 'no hashes'}\n" for path in bundles)
    run = subprocess.run(
        [program], input=lines, capture_output=True, text=True, check=True, timeout=120
    )
    errors = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(errors) == len(bundles)
    assert all(error is None or len(error.splitlines()) == 1 for error in errors)
    return errors


def python_error(bundle: Path, hashes: bool = True) -> str | None:
    """Return the Python runtime's error; None if it accepts the bundle."""
    try:
        verify_files(bundle, read_manifest(bundle), hashes=hashes)
    except PassError as error:
        return str(error)
    return None


def damaged_manifest(bundle: Path, target: Path, change: Callable[[dict], object]) -> Path:
    """Write a changed manifest as a bundle without other files."""
    document = real_document(bundle)
    change(document)
    target.mkdir()
    (target / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")
    return target


def sign(document: dict[str, Any]) -> None:
    document["digest"] = digest_of(document)


CHANGES: dict[str, Callable[[dict], object]] = {
    "edited": lambda document: document["model"].update(vocab_size=1),
    "unlisted": lambda document: document["files"].popitem(),
    "older": lambda document: document.update(version=4),
    "another digest": lambda document: document.update(digest="0" * 64),
    "engines": lambda document: document.update(engines=[]),
    "another number": lambda document: (
        document["lookahead"].update(acceptance_per_position=[0.123457, 1e-05, 0.5, 1.0]),
        sign(document),
    ),
    "another name": lambda document: (
        document["model"].update(name='Größe \u2028 "x"\t\x01\x7f/😀'),
        sign(document),
    ),
}
"""The last three are accepted: the error is that files are missing."""


@pytest.mark.parametrize("name", CHANGES)
def test_changed_manifests_are_refused_as_in_python(
    program: Path, tiny_bundle: Path, tmp_path: Path, name: str
):
    bundle = damaged_manifest(tiny_bundle, tmp_path / "bundle", CHANGES[name])
    (actual,), expected = cpp_errors(program, [bundle]), python_error(bundle)
    assert expected is not None and actual is not None
    accepted = "is missing; export the bundle again"
    assert (accepted in actual) == (accepted in expected) == (name in [*CHANGES][-3:])
    assert accepted in actual or actual == expected


SYNTAX = {
    "empty": b"",
    "word": b"not json",
    "deep": b"[" * 5000,
    "mark": b"\xef\xbb\xbf{}",
    "surrogate": b'{"a": "\\ud800"}',
    "behind": b"{} x",
    "number": b'{"a": 01}',
}
NO_MANIFESTS = {
    "list": b"[]",
    "nothing": b"{}",
    "byte": b"\xff\xfe{}",
    "cut": b'{"a": "\xe2\x82',
    "version": b'{"format": "pass-bundle", "version": [1, {"a": null}]}',
    "keys": '{"\u00fcber\\n\\t mut \u2028 \'": 1}'.encode(),
}


@pytest.mark.parametrize("data", [*SYNTAX.values(), *NO_MANIFESTS.values()])
def test_what_is_no_manifest_is_refused(program: Path, tmp_path: Path, data: bytes):
    (tmp_path / FILE_NAME).write_bytes(data)
    (actual,), expected = cpp_errors(program, [tmp_path]), python_error(tmp_path)
    assert expected is not None and actual is not None
    assert str(tmp_path / FILE_NAME) in actual
    invalid = f"{tmp_path / FILE_NAME}: file: Invalid JSON: "
    assert actual.startswith(invalid) == expected.startswith(invalid) == (data in SYNTAX.values())


def test_what_is_no_bundle_is_refused(program: Path, tmp_path: Path):
    (tmp_path / "odd" / FILE_NAME).mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    paths = [tmp_path, tmp_path / "nowhere", tmp_path / "file", tmp_path / "odd"]
    for path, actual in zip(paths, cpp_errors(program, paths), strict=True):
        expected = python_error(path)
        assert actual == expected or path.name == "odd", expected
        assert actual is not None and str(path) in actual


FILES = ["trunk.onnx.data", "tail.ar.greedy.onnx", "tokenizer.json", "chat_template.jinja"]


@pytest.mark.parametrize("hashes", [True, False])
def test_damaged_files_are_refused(program: Path, tiny_bundle: Path, tmp_path: Path, hashes: bool):
    """Files are missing, cut short, changed, or directories."""
    bundles = []
    for name in FILES:
        data = (tiny_bundle / name).read_bytes()
        for i, content in enumerate(
            (None, data[:-1], b"", bytes([data[0] ^ 1]) + data[1:], "directory")
        ):
            bundle = tmp_path / f"{name}.{i}"
            bundle.mkdir()
            linked(tiny_bundle, bundle)
            (bundle / name).unlink()
            if content == "directory":
                (bundle / name).mkdir()
            elif isinstance(content, bytes):
                (bundle / name).write_bytes(content)
            bundles.append(bundle)
    expected = [python_error(bundle, hashes) for bundle in bundles]
    # Without hashes, changed bytes are accepted.
    assert sum(message is None for message in expected) == (0 if hashes else len(FILES))
    assert cpp_errors(program, bundles, hashes) == expected


def test_real_bundles_are_read(program: Path, tiny_bundle: Path, head_bundle: Path):
    assert cpp_errors(program, [tiny_bundle, head_bundle]) == [None, None]
