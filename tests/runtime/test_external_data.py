"""Bundles whose files are symbolic links, and models that only seem to be."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from links import KINDS, bundle_of_links

from pass_runtime import GenerateOptions, PassError, load
from pass_runtime.backends.ort.external_data import resolve_links


def write_linked_model(directory: Path) -> Path:
    """Write a model whose weights are in the file content, by the link w.data. Return its path."""
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.UINT8, dims=[4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "w.data", "offset": "0", "length": "4"}.items():
        tensor.external_data.add(key=key, value=value)
    inside = onnx.TensorProto(name="inside", raw_data=b"12")
    graph = onnx.GraphProto(name="é" * 70, initializer=[tensor, inside])
    graph.node.add(op_type="Identity", input=["w"], output=["y"])
    model = onnx.ModelProto(graph=graph, ir_version=10, producer_name="x")
    model.metadata_props.add(key="k", value="v" * 300)
    (directory / "content").write_bytes(b"1234")
    (directory / "w.data").symlink_to("content")
    (directory / "m.onnx").write_bytes(model.SerializeToString())
    return directory / "m.onnx"


def test_only_the_name_of_the_file_of_weights_changes(tmp_path: Path):
    path = write_linked_model(tmp_path)
    content, folder = resolve_links(path)
    model = onnx.load_model_from_string(content)
    assert folder == tmp_path.resolve()
    (location,) = [
        entry for entry in model.graph.initializer[0].external_data if entry.key == "location"
    ]
    assert location.value == "content"
    location.value = "w.data"
    assert model == onnx.load(path, load_external_data=False)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_model_is_refused_or_left_to_onnx_runtime(data: st.DataObject):
    """One byte changes and the end is cut off: no other exception comes, and no endless loop."""
    with TemporaryDirectory() as name:
        path = write_linked_model(Path(name))
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        with suppress(PassError):
            resolve_links(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_bundle_of_links_opens(random_bundle, tmp_path, kind, absolute):
    def token_ids(bundle):
        with load(bundle) as session:
            return session.generate("The", GenerateOptions(max_new_tokens=8)).result().token_ids

    copy = bundle_of_links(random_bundle, tmp_path, kind, absolute)
    assert token_ids(copy) == token_ids(random_bundle)
    trunk = next(path for path in sorted(copy.iterdir()) if path.name.endswith(".onnx.data"))
    content = bytearray(trunk.read_bytes())
    content[100] ^= 1
    trunk.resolve().write_bytes(bytes(content))
    with pytest.raises(PassError, match="does not match its SHA-256"):
        token_ids(copy)
    trunk.resolve().unlink()
    with pytest.raises(PassError, match="is missing"):
        token_ids(copy)
