from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import at, linked, real_document, refusal, replace, write_manifest
from pydantic import ValidationError

from pass_runtime.bundle.integrity import file_info, verify_files
from pass_runtime.bundle.manifest import FILE_NAME, EngineSet, Manifest, Profile, digest_of
from pass_runtime.bundle.read import read_manifest
from pass_runtime.session import load

QUICK = settings(derandomize=True, deadline=None, max_examples=60)
FREE_KEYS = {"files", "tools"}
"""Objects of the manifest that may have any keys."""
OPTIONAL_KEYS = {"batch", "lookahead_rows", "quantization"}


@pytest.fixture(scope="module")
def document(tiny_bundle) -> dict:
    return real_document(tiny_bundle)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("manifest")


@pytest.fixture
def bundle(tiny_bundle, tmp_path) -> Path:
    return linked(tiny_bundle, tmp_path)


def refusal_of(document: dict, scratch: Path) -> str:
    """Return the error with which the manifest is refused, which names its file."""
    (scratch / FILE_NAME).write_text(json.dumps(document), encoding="utf-8")
    message = refusal(read_manifest, scratch)
    assert str(scratch / FILE_NAME) in message
    return message


def objects(node, path=()) -> list[tuple]:
    """Return the paths of all JSON objects with fixed keys."""
    object_paths = []
    if isinstance(node, dict) and not FREE_KEYS & set(path[-1:]):
        object_paths.append(path)
    if isinstance(node, (dict, list)):
        children = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in children:
            object_paths += objects(child, (*path, key))
    return object_paths


def test_a_written_manifest_is_read_as_it_was(tiny_bundle):
    manifest = read_manifest(tiny_bundle)
    assert Manifest.model_validate_json(manifest.text()) == manifest
    assert json.loads(manifest.text())["digest"] == manifest.digest


def test_the_digest_is_that_of_every_language():
    document = json.loads(
        r'{"format": "pass-bundle", "version": 5, "model": {"name": "Gr\u00f6\u00dfe \u2028 \"x\"\t'
        r'\u0001\u007f/\ud83d\ude00", "heads": 9}, "lookahead": {"acceptance_per_position": [0.5, '
        r'1.0, 1e-05, 0.123457, 0.0]}, "windows": [], "derived": [], "processors": null, '
        r'"engines": [{"x": 1}], "digest": "0"}'
    )
    expected = "33d19fb53d40c8f7026406ab32b32bd85e91ba67c2e04f1f13bdc81f3ace03ee"
    assert digest_of(document) == expected


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "vocab_size"), 328),
        (("model", "kv_heads"), 1),
        (("model", "name"), "other"),
        (("lookahead", "acceptance_per_position"), [0.5]),
        (("windows", 4, "groups"), []),
        (("trunk", "inputs", 0, "shape", 1), "rows"),
        (("rule",), "rejection"),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_an_edited_manifest_is_refused(document, scratch, path, value):
    changed = copy.deepcopy(document)
    at(changed, path[:-1])[path[-1]] = value
    assert "was edited after the export" in refusal_of(changed, scratch)


def test_engines_are_not_in_the_digest(document, bundle):
    replace(bundle / FILE_NAME, json.dumps(document | {"engines": []}).encode())
    assert read_manifest(bundle).engines == ()


@QUICK
@given(
    data=st.data(),
    key=st.text(min_size=1, max_size=8),
    value=st.one_of(st.none(), st.integers(), st.just({})),
)
def test_unknown_keys_are_refused_at_every_level(document, scratch, data, key, value):
    changed = copy.deepcopy(document)
    target = at(changed, data.draw(st.sampled_from(objects(changed))))
    key = key if key not in target else key + "?"
    target[key] = value
    refusal_of(changed, scratch)


@QUICK
@given(data=st.data())
def test_missing_keys_are_refused_at_every_level(document, scratch, data):
    changed = copy.deepcopy(document)
    # All keys of these two are optional: a window's samplers, and a model's special tokens.
    optional = (("tails",), ("special_tokens",))
    paths = [path for path in objects(changed) if path[-1:] not in optional]
    target = at(changed, data.draw(st.sampled_from(paths)))
    key = data.draw(st.sampled_from(sorted(set(target) - OPTIONAL_KEYS)))
    del target[key]
    assert key in refusal_of(changed, scratch)


@QUICK
@given(data=st.data())
def test_values_of_another_type_are_refused(document, scratch, data):
    changed = copy.deepcopy(document)
    target = at(changed, data.draw(st.sampled_from(objects(changed))))
    key = data.draw(st.sampled_from(sorted(target)))
    wrong = {"x": []} if not isinstance(target[key], dict) else 7
    target[key] = data.draw(st.sampled_from([wrong, 1.5, [[None]]]))
    refusal_of(changed, scratch)


@pytest.mark.parametrize("version", [0, 4, 99, "2", None, 1.5])
def test_other_versions_are_refused(document, scratch, version):
    """The version is checked before the keys, because it is why a newer manifest has other keys."""
    message = refusal_of(document | {"version": version, "news": 1}, scratch)
    assert f"version {version!r} is not 5; export the bundle again" in message


@pytest.mark.parametrize("change", [{"format": "pass"}, {"format": None}, {"opset": "24"}])
def test_other_formats_are_refused(document, scratch, change):
    assert next(iter(change)) in refusal_of(document | change, scratch)
    model = document["model"] | {"rope": 1}  # no key of the format
    assert "model.rope" in refusal_of(document | {"model": model}, scratch)


@pytest.mark.parametrize("change", [{"scheme": "other"}, {"members": 16}, {"row": 8}, {"bits": 31}])
def test_another_noise_scheme_is_refused(document, scratch, change):
    """The bundle's tails would draw other tokens than this version's sampler in numpy does."""
    assert "noise" in refusal_of(document | {"noise": document["noise"] | change}, scratch)


@QUICK
@given(cut=st.integers(0, 10**6))
def test_a_truncated_manifest_is_refused(tiny_bundle, scratch, cut):
    whole = (tiny_bundle / FILE_NAME).read_bytes().rstrip()
    (scratch / FILE_NAME).write_bytes(whole[: cut % len(whole)])
    assert FILE_NAME in refusal(read_manifest, scratch)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"\x80", b"not json", b"{}", b"[" * 5000]
)
def test_what_is_not_a_manifest_is_refused(scratch, data):
    (scratch / FILE_NAME).write_bytes(data)
    assert str(scratch / FILE_NAME) in refusal(read_manifest, scratch)


def test_a_path_without_a_bundle_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "odd" / FILE_NAME).mkdir(parents=True)
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file", tmp_path / "odd"):
        assert str(path) in refusal(load, path)


@QUICK
@given(data=st.data())
def test_a_flipped_byte_is_found(tiny_bundle, tmp_path_factory, data):
    bundle = tmp_path_factory.mktemp("flipped")
    manifest = read_manifest(tiny_bundle)
    small = sorted(name for name, info in manifest.files.items() if info.bytes < 500_000)
    name = data.draw(st.sampled_from(small))
    for path in tiny_bundle.iterdir():
        if path.name != name:
            (bundle / path.name).symlink_to(path)
    content = bytearray((tiny_bundle / name).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (bundle / name).write_bytes(content)
    assert str(bundle / name) in refusal(verify_files, bundle, manifest)
    verify_files(bundle, manifest, hashes=False)  # nothing else is wrong with the bundle


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize(
    "name", ["trunk.onnx.data", "tail.ar.greedy.onnx", "tokenizer.json", "chat_template.jinja"]
)
def test_missing_and_truncated_files_are_refused_even_without_hashes(bundle, name, hashes):
    manifest, path = read_manifest(bundle), bundle / name
    replace(path, path.read_bytes()[:-1])
    assert str(path) in refusal(verify_files, bundle, manifest, hashes=hashes)
    replace(path, b"")
    assert str(path) in refusal(load, bundle, "cpu", verify=hashes)
    path.unlink()
    assert str(path) in refusal(verify_files, bundle, manifest, hashes=hashes)
    path.mkdir()
    assert str(path) in refusal(load, bundle, "cpu", verify=hashes)


ESCAPING = ("../secret", "/etc/hostname", "a/../../secret", "..", "x/..")


@pytest.mark.parametrize(
    "name", [*ESCAPING, "", "x" * 300, "two\nlines", "nul\0", "trunk.onnx/inside"]
)
def test_names_that_no_file_of_a_bundle_can_have_are_refused_in_one_line(bundle, document, name):
    (bundle.parent / "secret").write_bytes(b"x")
    files = document["files"] | {name: {"sha256": "0" * 64, "bytes": 1}}
    write_manifest(bundle, document | {"files": files})
    message = refusal(load, bundle, "cpu")
    if name in ESCAPING:
        assert "outside the bundle" in message and repr(name) in message


@pytest.mark.parametrize(
    "file",
    ["trunk.onnx", "tail.verify-3.sample.onnx", "tokenizer.json", "chat_template.jinja"],
)
def test_files_in_use_must_be_listed(bundle, document, file):
    files = {name: info for name, info in document["files"].items() if name != file}
    write_manifest(bundle, document | {"files": files})
    assert f"{file} is used but not listed" in refusal(load, bundle, "cpu", verify=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "trunk.cpu.onnx", "chat_template.jinja"])
def test_a_broken_file_with_the_right_hash_is_refused(bundle, document, name):
    """The library that reads the file fails, and its error becomes a PassError."""
    replace(bundle / name, b"{% broken \xff")
    files = document["files"] | {name: file_info(bundle / name).model_dump()}
    write_manifest(bundle, document | {"files": files})
    assert name in refusal(load, bundle, "cpu")


@pytest.mark.slow
def test_the_content_hash_depends_on_graphs_and_weights_alone(tiny_bundle):
    """By this hash an engine set names the bundle that it was built from."""
    manifest = read_manifest(tiny_bundle)
    for name, info in manifest.files.items():
        files = manifest.files | {name: info.model_copy(update={"sha256": "0" * 64})}
        changed_hash = manifest.model_copy(update={"files": files}).content_hash
        is_text = name in ("tokenizer.json", "chat_template.jinja")
        assert (changed_hash == manifest.content_hash) is is_text, name


@pytest.mark.parametrize("field", ["capacities", "prefill_widths"])
def test_sizes_of_engines_are_positive(field):
    sizes = {"capacities": (64, 128), "prefill_widths": (32, 16)} | {field: (16, -1)}
    texts = {"directory": "one", "library": "tensorrt", "version": "11.0", "bundle": ""}
    others = {"targets": (), "engines": (), "lookahead": 1, "max_batch_size": 1}
    with pytest.raises(ValidationError, match=rf"{field}\.1\n.* greater than or equal to 1"):
        EngineSet(**texts, **others, **sizes)


def test_a_profile_admits_sizes_within_all_of_its_ranges():
    profile = Profile(sizes={"batch": (1, 1, 2), "width": (4, 4, 8)})
    assert profile.admits({"batch": 2, "width": 4, "columns": 512})
    assert not profile.admits({"batch": 3, "width": 4})
    assert not profile.admits({"batch": 1})  # without a width
