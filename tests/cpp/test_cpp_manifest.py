"""The C++ runtime refuses the damaged bundles that the Python runtime refuses, in one line and for
the same field."""

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
"""The values that replace every value of a manifest in turn."""
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
}


@pytest.fixture(scope="session")
def program() -> Path:
    return program_at("check_bundles")


@pytest.fixture(params=["tiny_bundle", "head_bundle"])
def bundle(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def cpp_errors(program: Path, bundles: list[Path], hashes: bool = True) -> list[str | None]:
    """Return the C++ runtime's error for each bundle; None if it accepts the bundle."""
    lines = "".join(f"{path}{'' if hashes else chr(9) + 'no hashes'}\n" for path in bundles)
    run = subprocess.run(
        [program], input=lines, capture_output=True, text=True, check=True, timeout=120
    )
    errors = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(errors) == len(bundles)
    return errors


def python_error(bundle: Path, hashes: bool = True) -> str | None:
    """Return the Python runtime's error; None if it accepts the bundle."""
    try:
        verify_files(bundle, read_manifest(bundle), hashes=hashes)
    except PassError as error:
        return str(error)
    return None


def small_with_every_field(document: dict) -> dict:
    """Return `document` with few plans, so that it is read quickly, and with every kind of
    field."""
    shares = {"acceptance_per_position": [0.5], "acceptance_per_position_sampled": []}
    return document | {
        "lookahead": document["lookahead"] | {"length": 1} | shares,
        "plans": document["plans"][:4],
        "model": document["model"] | {"quantization": QUANTIZATION},
        "engines": [ENGINES],
    }


PROBLEM = re.compile(
    r"cannot read [^:]+: |[^:]+: manifest version |([^:]+: [\w.]+?)(\.int|\.str|\.\[key\])?: "
)
"""How an error begins: with the file, or a field of it. The rest may differ between the
runtimes."""
CONTRADICTS, NO_FILE = " contradicts itself: ", "is missing; export the bundle again"


def problem(message: str | None) -> str | None:
    """Return the file and the field that an error names, or the whole message if it names none."""
    assert message is None or (len(message.splitlines()) == 1 and "\0" not in message), message
    match = PROBLEM.match(message) if message is not None else None
    return message if match is None else match[1] or match[0]


def paths_of_values(node, path: tuple = ()) -> Iterator[tuple]:
    """Yield the paths of all values. Of lists, and of objects whose keys are not fields, only the
    first and the last item are taken."""
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
        yield from paths_of_values(child, (*path, key))


def replaced(document: dict, path: tuple, value) -> dict:
    """Return `document` with another value at `path`."""
    if not path:
        return value
    changed = copy.copy(document)
    changed[path[0]] = replaced(document[path[0]], path[1:], value)
    return changed


def damages(document: dict) -> Iterator[dict]:
    """Yield documents that differ from `document` in one value."""
    for path in paths_of_values(document):
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
    original = json.loads((bundle / FILE_NAME).read_text(encoding="utf-8"))
    document = small_with_every_field(original)
    damaged = list(damages(document))
    assert len(damaged) > 2000
    documents = [document, *random.Random(0).sample(damaged, 150)]
    directories = write_manifests(tmp_path, documents)
    expected = [python_error(directory) for directory in directories]
    accepted = [message for message in expected if message.endswith(NO_FILE)]
    assert expected[0] in accepted
    assert 1 <= len(accepted) < 30  # the undamaged manifest, and harmless changes
    actual = cpp_errors(program, directories)
    for changed, cpp, python in zip(documents, actual, expected, strict=True):
        # Each runtime refuses the contradictions that would crash or mislead it (C++:
        # manifest_test.cpp). Without a contradiction, the next error is the first missing file.
        one_contradicts = CONTRADICTS in cpp + python and all(
            CONTRADICTS in each or each.endswith(NO_FILE) for each in (cpp, python)
        )
        assert one_contradicts or problem(cpp) == problem(python), [
            key for key in document if changed and changed.get(key) != document[key]
        ]
    assert any(CONTRADICTS in message for message in actual)


def write_manifests(directory: Path, documents: list) -> list[Path]:
    """Write each document as the manifest of a bundle without other files. Return the bundles."""
    bundles = [directory / str(i) for i in range(len(documents))]
    for bundle, document in zip(bundles, documents, strict=True):
        bundle.mkdir()
        (bundle / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")
    return bundles


def test_the_devices_of_derived_trunks(program: Path, bundle: Path, tmp_path: Path):
    document = json.loads((bundle / FILE_NAME).read_text(encoding="utf-8"))
    devices = ("cpu", "cuda", "tpu")
    documents = [replaced(document, ("derived", 0, "device"), device) for device in devices]
    bundles = write_manifests(tmp_path, documents)
    for device, bundle, actual in zip(devices, bundles, cpp_errors(program, bundles), strict=True):
        expected = python_error(bundle)
        assert problem(actual) == problem(expected)
        # For the other devices, the error is that the graphs are missing.
        assert ("derived.0.device" in expected) == (device == "tpu")


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
def test_what_is_not_json_is_refused(program: Path, tmp_path: Path, data: bytes):
    (tmp_path / FILE_NAME).write_bytes(data)
    (actual,), expected = cpp_errors(program, [tmp_path]), python_error(tmp_path)
    invalid = f"{tmp_path / FILE_NAME}: file: Invalid JSON: "
    assert expected.startswith(invalid)
    assert actual.startswith(invalid)
    assert len(actual.splitlines()) == 1


NO_MANIFESTS = {
    "list": b"[]",
    "null": b"null",
    "nothing": b"{}",
    "byte": b"\xff\xfe{}",
    "continuation": b'{"a": "\xc3("}',
    "cut": b'{"a": "\xe2\x82',
    "overlong": b"\xc0\x80",
    "version": b'{"format": "pass-bundle", "version": [1, {"a": null}]}',
    "float": b'{"format": "pass-bundle", "version": 4.0}',
    "keys": '{"\u00fcber\\n\\t mut \u2028 \'": 1}'.encode(),
}


@pytest.mark.parametrize("data", NO_MANIFESTS.values(), ids=NO_MANIFESTS)
def test_what_is_no_manifest_is_refused(program: Path, tmp_path: Path, data: bytes):
    (tmp_path / FILE_NAME).write_bytes(data)
    (actual,) = cpp_errors(program, [tmp_path])
    assert problem(actual) == problem(python_error(tmp_path))


def test_unknown_keys_and_odd_names_are_refused(program: Path, tiny_bundle: Path, tmp_path: Path):
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
    with_file = [document | {"files": document["files"] | {name: info}} for name in names]
    with_key = [document | {name: 1} for name in [*names, "nul\0"]]
    reasons = ["could point outside the bundle"] * len(with_file) + ["unknown key"] * len(with_key)
    bundles = write_manifests(tmp_path, with_file + with_key)
    for bundle, reason, actual in zip(bundles, reasons, cpp_errors(program, bundles), strict=True):
        assert reason in python_error(bundle) and reason in actual
        assert problem(actual).startswith(f"{bundle / FILE_NAME}: ")


def test_what_is_no_bundle_is_refused(program: Path, tmp_path: Path):
    (tmp_path / "odd" / FILE_NAME).mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    paths = [tmp_path, tmp_path / "nowhere", tmp_path / "file", tmp_path / "odd"]
    assert [problem(error) for error in cpp_errors(program, paths)] == [
        problem(python_error(path)) for path in paths
    ]


FILES = ["trunk.onnx.data", "tail.ar.greedy.onnx", "tokenizer.json", "chat_template.jinja"]


@pytest.mark.parametrize("hashes", [True, False])
def test_damaged_files_are_refused(program: Path, tiny_bundle: Path, tmp_path: Path, hashes: bool):
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
    expected = [python_error(bundle, hashes) for bundle in bundles]
    # Unlisted weights are accepted, as only a graph names them; without hashes, changed bytes, too.
    assert sum(message is None for message in expected) == (1 if hashes else 1 + len(FILES))
    assert cpp_errors(program, bundles, hashes) == expected


def test_real_bundles_are_read(program: Path, bundle: Path):
    assert cpp_errors(program, [bundle, Path(f"{bundle}/./")]) == [None, None]
