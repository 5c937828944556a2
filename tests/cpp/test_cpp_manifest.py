"""Damaged bundles: the C++ runtime refuses those that the Python runtime refuses, in one line and
for the same field."""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpp_programs import program_at

from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError

WRONG = [None, True, 0, -1, 3, 2**40, 1.5, "", "x", [], [[None]], {}, {"x": []}]
"""Values that replace any value."""
ENGINES = {
    "directory": "rtx-1",
    "library": "tensorrt-rtx",
    "version": "1.0",
    "targets": ["sm89"],
    "bundle": "0" * 64,
    "lookahead": 1,
    "max_batch_size": 1,
    "capacities": [256],
    "prefill_widths": [16],
    "engines": [
        {
            "graph": "trunk.onnx",
            "file": "trunk.engine",
            "sha256": "0" * 64,
            "bytes": 1,
            "profiles": [{"sizes": {"batch": [1, 1, 1]}}],
            "aliases": {"present_key.0": "past_key.0"},
        }
    ],
}
QUANTIZATION = {
    "grid": {"numbers": "int4", "block_size": 32, "zero_points": True},
    "lm_head": {"numbers": "int8", "block_size": None, "zero_points": False, "offsets": False},
    "layers": {"model.layers.0.mlp": {"numbers": "int8", "block_size": 32, "zero_points": False}},
    "calibration": None,
    "activations": "static_int8",
    "weight_only": ["lm_head"],
}


@pytest.fixture(scope="session")
def program() -> Path:
    return program_at("check_bundles")


@pytest.fixture(params=["tiny_bundle", "head_bundle"])
def bundle(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def complaints(program: Path, bundles: list[Path], hashes: bool = True) -> list[str | None]:
    """Return the C++ runtime's errors; None for a bundle that it accepts."""
    lines = "".join(f"{path}{'' if hashes else chr(9) + 'no hashes'}\n" for path in bundles)
    run = subprocess.run(
        [program], input=lines, capture_output=True, text=True, check=True, timeout=120
    )
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == len(bundles)
    return found


def complaint(bundle: Path, hashes: bool = True) -> str | None:
    """Return the Python runtime's error; None if it accepts the bundle."""
    try:
        verify_files(bundle, read_manifest(bundle), hashes=hashes)
    except PassError as error:
        return str(error)
    return None


def small(document: dict) -> dict:
    """Return `document` with one look-ahead row and every kind of entry, which is read quickly."""
    shares = {"acceptance_per_position": [0.5], "acceptance_per_position_sampled": []}
    lookahead = document["lookahead"] | {"length": 1} | shares
    model = document["model"] | {"quantization": QUANTIZATION}
    return document | {
        "lookahead": lookahead,
        "plans": document["plans"][:4],
        "model": model,
        "engines": [ENGINES],
    }


PROBLEM = re.compile(
    r"cannot read [^:]+: |[^:]+: manifest version |([^:]+: [\w.]+?)(\.int|\.str|\.\[key\])?: "
)
"""How the error for a file, or for a field of it, begins. The rest differs between the runtimes."""


CONTRADICTS, NO_FILE = " contradicts itself: ", "is missing; export the bundle again"


def problem(message: str | None) -> str | None:
    """Return the file and the field that were refused, or the whole message if it names none."""
    assert message is None or (len(message.splitlines()) == 1 and "\0" not in message), message
    found = PROBLEM.match(message) if message is not None else None
    return message if found is None else found[1] or found[0]


def kinds(node, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths of all values; of lists and of objects with free keys only the first and the
    last item."""
    yield path
    children = list(
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else []
    )
    if isinstance(node, list) or path[-1:] in (("files",), ("feeds",), ("tools",)):
        children = children[:1] + children[1:][-1:]
    for key, child in children:
        yield from kinds(child, (*path, key))


def replaced(document: dict, path: tuple, value) -> dict:
    """Return `document` with another value at `path`."""
    if not path:
        return value
    changed = copy.copy(document)
    changed[path[0]] = replaced(document[path[0]], path[1:], value)
    return changed


def damages(document: dict) -> Iterator[dict]:
    """Yield documents that differ from `document` in one value."""
    for path in kinds(document):
        value = document
        for key in path:
            value = value[key]
        if isinstance(value, int) and not isinstance(value, bool):
            yield from (replaced(document, path, value + more) for more in (1, -1, 4, value))
        if isinstance(value, dict):
            yield replaced(document, path, value | {"new": 1})
            yield from (
                replaced(document, path, {k: v for k, v in value.items() if k != key})
                for key in value
            )
        if isinstance(value, list):
            yield replaced(document, path, value[:-1])
            yield replaced(document, path, value + value[-1:])
        yield from (replaced(document, path, wrong) for wrong in WRONG)


def test_manifests_with_one_wrong_value_are_refused_as_in_python(
    program: Path, bundle: Path, tmp_path: Path
):
    document = small(json.loads((bundle / FILE_NAME).read_text(encoding="utf-8")))
    changed = list(damages(document))
    assert len(changed) > 2000
    changed = [document, *random.Random(0).sample(changed, 150)]
    directories = [tmp_path / str(i) for i in range(len(changed))]
    for directory, damaged in zip(directories, changed, strict=True):
        directory.mkdir()
        (directory / FILE_NAME).write_text(json.dumps(damaged), encoding="utf-8")
    expected = [complaint(directory) for directory in directories]
    read = [message for message in expected if message.endswith(NO_FILE)]
    assert expected[0] in read
    assert 1 <= len(read) < 30  # what is not damaged, and harmless changes
    found_by_cpp = complaints(program, directories)
    for damaged, found, message in zip(changed, found_by_cpp, expected, strict=True):
        # Each runtime refuses contradictions that would crash or mislead it (C++:
        # manifest_test.cpp). Without one, the next error is the first missing file.
        both = (found, message)
        either = CONTRADICTS in found + message and all(
            CONTRADICTS in each or each.endswith(NO_FILE) for each in both
        )
        assert either or problem(found) == problem(message), [
            key for key in document if damaged and damaged.get(key) != document[key]
        ]
    assert any(CONTRADICTS in message for message in found_by_cpp)


def test_the_devices_of_derived_trunks(program: Path, bundle: Path, tmp_path: Path):
    document = json.loads((bundle / FILE_NAME).read_text(encoding="utf-8"))
    for device, refused in (("cpu", False), ("cuda", False), ("tpu", True)):
        directory = tmp_path / device
        directory.mkdir()
        changed = replaced(document, ("derived", 0, "device"), device)
        (directory / FILE_NAME).write_text(json.dumps(changed), encoding="utf-8")
        (found,), expected = complaints(program, [directory]), complaint(directory)
        assert problem(found) == problem(expected)
        assert ("derived.0.device" in expected) == refused  # else the graphs are what is missing


SYNTAX = {
    "empty": b"",
    "open": b"{",
    "word": b"not json",
    "deep": b"[" * 5000,
    "comma": b'{"format": "pass-bundle",}',
    "mark": b"\xef\xbb\xbf{}",
    "control": b'{"a": "\n"}',
    "surrogate": b'{"a": "\\ud800"}',
    "behind": b"{} x",
    "number": b'{"a": 01}',
}


@pytest.mark.parametrize("data", SYNTAX.values(), ids=SYNTAX)
def test_what_is_not_json(program: Path, tmp_path: Path, data: bytes):
    (tmp_path / FILE_NAME).write_bytes(data)
    (found,), expected = complaints(program, [tmp_path]), complaint(tmp_path)
    invalid = f"{tmp_path / FILE_NAME}: file: Invalid JSON: "
    assert expected.startswith(invalid)
    assert found.startswith(invalid)
    assert len(found.splitlines()) == 1


OTHER = {
    "list": b"[]",
    "null": b"null",
    "nothing": b"{}",
    "byte": b"\xff\xfe{}",
    "continuation": b'{"a": "\xc3("}',
    "cut": b'{"a": "\xe2\x82',
    "overlong": b"\xc0\x80",
    "version": b'{"format": "pass-bundle", "version": [1, {"a": null}]}',
    "float": b'{"format": "pass-bundle", "version": 3.0}',
    "keys": '{"\u00fcber\\n\\t mut \u2028 \'": 1}'.encode(),
}


@pytest.mark.parametrize("data", OTHER.values(), ids=OTHER)
def test_what_is_no_manifest(program: Path, tmp_path: Path, data: bytes):
    (tmp_path / FILE_NAME).write_bytes(data)
    (found,), expected = complaints(program, [tmp_path]), complaint(tmp_path)
    assert problem(found) == problem(expected)


def test_unknown_keys_and_odd_names(program: Path, tiny_bundle: Path, tmp_path: Path):
    document = json.loads((tiny_bundle / FILE_NAME).read_text(encoding="utf-8"))
    info = {"sha256": "0" * 64, "bytes": 1}
    names = [
        "../secret",
        "/etc/hostname",
        "..",
        "",
        "x" * 101,
        "two\nlines",
        "a/b",
        "it's",
        "é\u200b",
        "\"'",
    ]
    changed = [document | {"files": document["files"] | {name: info}} for name in names]
    changed += [document | {name: 1} for name in [*names, "nul\0"]]
    directories = [tmp_path / str(i) for i in range(len(changed))]
    for directory, damaged in zip(directories, changed, strict=True):
        directory.mkdir()
        (directory / FILE_NAME).write_text(json.dumps(damaged), encoding="utf-8")
    for directory, found in zip(directories, complaints(program, directories), strict=True):
        message = complaint(directory)
        words = (
            "could point outside the bundle" if int(directory.name) < len(names) else "unknown key"
        )
        assert words in message and words in found
        assert problem(found).startswith(f"{directory / FILE_NAME}: ")


def test_no_bundle_there(program: Path, tmp_path: Path):
    (tmp_path / "odd" / FILE_NAME).mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    paths = [tmp_path, tmp_path / "nowhere", tmp_path / "file", tmp_path / "odd"]
    assert [problem(found) for found in complaints(program, paths)] == [
        problem(complaint(path)) for path in paths
    ]


FILES = ["trunk.onnx.data", "tail.ar.greedy.onnx", "tokenizer.json", "chat_template.jinja"]


@pytest.mark.parametrize("hashes", [True, False])
def test_damaged_files(program: Path, tiny_bundle: Path, tmp_path: Path, hashes: bool):
    """Files are missing, cut short, changed, directories, or in use but not listed."""
    bundles = []
    for name in FILES:
        data = (tiny_bundle / name).read_bytes()
        for i, content in enumerate(
            (None, data[:-1], b"", bytes([data[0] ^ 1]) + data[1:], "directory", "unlisted")
        ):
            bundle = tmp_path / f"{name}.{i}"
            bundle.mkdir()
            for path in tiny_bundle.iterdir():
                if path.name != name:
                    (bundle / path.name).symlink_to(path)
            if content == "directory":
                (bundle / name).mkdir()
            elif content == "unlisted":
                (bundle / name).write_bytes(data)
                document = json.loads((bundle / FILE_NAME).read_text(encoding="utf-8"))
                del document["files"][name]
                (bundle / FILE_NAME).unlink()
                (bundle / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")
            elif content is not None:
                (bundle / name).write_bytes(content)
            bundles.append(bundle)
    expected = [complaint(bundle, hashes) for bundle in bundles]
    assert sum(message is None for message in expected) == (1 if hashes else 1 + len(FILES))
    assert complaints(program, bundles, hashes) == expected


def test_real_bundles_are_read(program: Path, bundle: Path):
    assert complaints(program, [bundle, Path(f"{bundle}/./")]) == [None, None]
