"""The C++ runtime opens bundles whose files are links, and checks the files behind the links."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cpp_programs import generate
from links import KINDS, bundle_of_links
from manifests import real_document, write_manifest

from pass_runtime.bundle.integrity import file_info


def tokens(bundle: Path) -> list[int]:
    done = generate(bundle, 8)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["token_ids"]


@pytest.fixture(scope="module")
def expected(random_bundle: Path) -> list[int]:
    return tokens(random_bundle)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_bundle_of_links_opens(
    random_bundle: Path, expected: list[int], tmp_path: Path, kind: str, absolute: bool
):
    bundle = bundle_of_links(random_bundle, tmp_path, kind, absolute)
    assert tokens(bundle) == expected
    assert generate(bundle, 8, "--trust-bundle").returncode == 0
    weights = (bundle / "trunk.onnx.data").resolve()
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    assert "does not match its SHA-256" in generate(bundle, 8).stderr
    weights.unlink()
    assert "trunk.onnx.data is missing" in generate(bundle, 8).stderr


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half of it": lambda model: model[: len(model) // 2],
    "no model": lambda _: b"\xff" * 100,
    "other weights": lambda model: model.replace(b"trunk.onnx.data", b"trunk.onnx.away"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_behind_a_link_is_refused(random_bundle: Path, tmp_path: Path, damage: str):
    """The manifest gets the damaged file's size and hash, so that ONNX Runtime reads the file."""
    bundle = bundle_of_links(random_bundle, tmp_path, "graphs", absolute=False)
    document = real_document(bundle)
    for path in bundle.glob("trunk*.onnx"):
        path.resolve().write_bytes(DAMAGES[damage](path.read_bytes()))
        document["files"][path.name] = file_info(path).model_dump()
    write_manifest(bundle, document)
    done = generate(bundle, 8)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert ("trunk.onnx.away" in done.stderr) == (damage == "other weights"), done.stderr
