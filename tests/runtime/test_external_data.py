"""`align` and `link` of external_data.py: the weights of a saved model move to aligned offsets of a
file, and nothing else about the model changes, as the library onnx reads it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from links import KINDS, bundle_of_links
from onnx import TensorProto

from pass_runtime import GenerateOptions, PassError, load
from pass_runtime.backends.ort.external_data import AlignedModel, UnknownFormat, align, link
from pass_runtime.bundle.integrity import file_info

BLOBS = st.lists(st.binary(min_size=1, max_size=90), min_size=1, max_size=3)
TENSORS = st.lists(st.tuples(BLOBS, st.lists(BLOBS, max_size=2)), max_size=4)
"""For each tensor: the blobs of which the first is its values, and its packed forms, each of which
is several blobs."""


def external(name: str, **entries: object) -> TensorProto:
    """Return a tensor whose values are in another file. entries: say where."""
    tensor = TensorProto(name=name, data_type=TensorProto.UINT8, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def model_of(*tensors: TensorProto) -> onnx.ModelProto:
    inside = TensorProto(name="inside", raw_data=b"12")
    graph = onnx.GraphProto(name="é" * 70, initializer=[*tensors, inside])
    graph.node.add(op_type="Identity", input=["inside"], output=["y"])
    model = onnx.ModelProto(graph=graph, ir_version=10, producer_name="x")
    model.metadata_props.add(key="k", value="v" * 300)
    return model


def write_model(directory: Path, tensors: list) -> onnx.ModelProto:
    """Write a model as ONNX Runtime does: the blobs to saved.data, and to saved.onnx where they
    are. Return the model."""
    protos, content = [], bytearray(b"?")

    def append(blob: bytes) -> int:
        content.extend(blob)
        return len(content) - len(blob)

    for number, (blobs, forms) in enumerate(tensors):
        entries = {"offset": append(blobs[0]), "length": len(blobs[0])}
        tensor = external(f"t{number}", location="saved.data", **entries)
        for form in forms:
            parts = [f"{append(blob)};{len(blob)};0" for blob in form]
            packed = "|".join(["MatMul+123", *parts])
            tensor.external_data.add(key=f"prepacked_{len(form) - 1}", value=packed)
        protos.append(tensor)
    (directory / "saved.data").write_bytes(content)
    model = model_of(*protos)
    (directory / "saved.onnx").write_bytes(model.SerializeToString())
    return model


def align_saved(directory: Path, alignment: int = 64) -> AlignedModel:
    """Align the model saved.onnx as new.onnx."""
    names = directory / "saved.onnx", "saved.data", directory / "new.onnx", "new.data"
    return align(*names, alignment)


@settings(max_examples=60, deadline=None)
@given(tensors=TENSORS, alignment=st.sampled_from([1, 64, 4096]))
def test_every_blob_is_copied_to_an_aligned_place(tensors: list, alignment: int):
    with TemporaryDirectory() as name:
        directory = Path(name)
        original = write_model(directory, tensors)
        aligned = align_saved(directory, alignment)
        assert aligned.files == {name: file_info(directory / name) for name in aligned.files}
        assert set(aligned.files) == {"new.onnx", "new.data"}
        content = (directory / "new.data").read_bytes()
        changed = onnx.load(directory / "new.onnx", load_external_data=False)

    def blob(offset: str, length: str) -> bytes:
        assert int(offset) % alignment == 0
        return content[int(offset) :][: int(length)]

    for tensor, (blobs, forms) in zip(changed.graph.initializer, tensors, strict=False):
        location, offset, length, *packed = tensor.external_data
        assert location.value == "new.data" and blob(offset.value, length.value) == blobs[0]
        for entry, form in zip(packed, forms, strict=True):
            assert [blob(*part.split(";")[:2]) for part in entry.value.split("|")[1:]] == form
    for model in (original, changed):  # the same but for the offsets
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                entry.value = entry.value.split("|")[0] if entry.key.startswith("prepacked") else ""
    assert original == changed


@settings(max_examples=60, deadline=None)
@given(tensors=TENSORS, kept=st.integers(0, 3), other=st.booleans())
def test_a_model_with_some_of_the_blobs_is_linked_to_their_file(
    tensors: list, kept: int, other: bool
):
    """A model that has another blob (`other`) too is not."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, tensors)
        aligned = align_saved(directory)
        some = [*tensors[:kept], *([([b"in none of them"], [])] if other else [])]
        write_model(directory, some)
        names = directory / "saved.onnx", "saved.data", directory / "some.onnx", "some.data"
        linked = link(*names, directory / "new.data", aligned)
        if other:
            assert linked is None and not (directory / "some.data").exists()
            return
        assert linked is not None and (directory / "some.data").samefile(directory / "new.data")
        assert set(linked.files) == {"some.onnx", "some.data"}
        assert linked.files == {name: file_info(directory / name) for name in linked.files}
        changed = onnx.load(directory / "some.onnx", load_external_data=False)
        content = (directory / "new.data").read_bytes()
    for tensor, (blobs, _) in zip(changed.graph.initializer, some, strict=False):
        _, offset, length, *_ = tensor.external_data
        assert content[int(offset.value) :][: int(length.value)] == blobs[0]


SAVED = {"location": "saved.data", "offset": 0, "length": 1}
UNKNOWN = {
    "another file": SAVED | {"location": "another.data"},
    "no offset": {"location": "saved.data", "length": 1},
    "beyond the end": SAVED | {"length": 9},
    "an unknown entry": SAVED | {"checksum": "0"},
    "a packed form beyond the end": SAVED | {"prepacked_0": "MatMul+1|0;9;0"},
}


@pytest.mark.parametrize("entries", UNKNOWN.values(), ids=UNKNOWN)
def test_a_model_of_an_unknown_format_is_refused(tmp_path: Path, entries: dict[str, object]):
    (tmp_path / "saved.data").write_bytes(b"1234")
    (tmp_path / "saved.onnx").write_bytes(model_of(external("t", **entries)).SerializeToString())
    with pytest.raises(UnknownFormat):
        align_saved(tmp_path)


def test_external_values_of_an_attribute_are_refused(tmp_path: Path):
    model = model_of()
    tensor = external("t", **SAVED)
    model.graph.node[0].attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=tensor)
    (tmp_path / "saved.data").write_bytes(b"1234")
    (tmp_path / "saved.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(UnknownFormat, match="besides"):
        align_saved(tmp_path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_model_is_copied_or_refused_as_of_an_unknown_format(data: st.DataObject):
    """One byte changes and the end is cut off: no other exception comes, and no endless loop."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, [([b"1234"], [[b"56"]])])
        content = bytearray((directory / "saved.onnx").read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        (directory / "saved.onnx").write_bytes(content[: data.draw(st.integers(0, len(content)))])
        with suppress(UnknownFormat):
            align_saved(directory)


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
