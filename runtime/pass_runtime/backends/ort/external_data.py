"""Copies an ONNX model, so that every blob of its external weights begins at an aligned offset.

The model is edited as the bytes of its protobuf
(https://protobuf.dev/programming-guides/encoding/). Only entries that give the place of a blob are
changed: field 7 of a ModelProto is its graph, field 5 of a GraphProto an initializer, field 13 of a
TensorProto an entry of its external data, with the key in field 1 and the value in field 2
(onnx.proto). ONNX Runtime adds entries whose key begins with `prepacked` and whose value is
NAME|offset;length;checksum|..., for the packed forms of the tensor that its kernels read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pass_runtime.bundle.manifest import FileInfo
from pass_runtime.errors import PassError

GRAPH, INITIALIZER, EXTERNAL_DATA, KEY, VALUE = 7, 5, 13, 1, 2
"""Field numbers."""
VARINT, EIGHT_BYTES, DELIMITED, FOUR_BYTES = 0, 1, 2, 5
"""Protobuf's wire types."""
PIECE_BYTES = 1 << 22

Field = tuple[int, int, int, int]
"""A field's number, and the offsets of its start, of its content and of its end."""


class UnknownFormat(ValueError):
    """The model is not as ONNX Runtime writes it."""


@dataclass(frozen=True)
class AlignedModel:
    """A model and its weights as `align` wrote them. files: sizes and hashes, by the file's name.
    blobs: offsets in the file of weights, by the blob's SHA-256."""

    files: Mapping[str, FileInfo]
    blobs: Mapping[str, int]


def align(model: Path, data: str, target: Path, new_data: str, alignment: int) -> AlignedModel:
    """Copy `model` to `target`, and its weights from the file `data` beside `model` to the file
    `new_data` beside `target`. Raises UnknownFormat if `model` has other weights too, or is not as
    ONNX Runtime writes models."""
    with (model.parent / data).open("rb") as old, (target.parent / new_data).open("xb") as new:
        blobs = _Blobs(old, new, alignment)
        graph = _relocate(model, data, target, new_data, blobs.move)
    return AlignedModel({target.name: graph, new_data: blobs.info()}, blobs.offsets)


def link(
    model: Path, data: str, target: Path, new_data: str, other: Path, known: AlignedModel
) -> AlignedModel | None:
    """As `align`, but `new_data` becomes a hard link to the weights' file `other`, which `known`
    describes. None if `other` lacks a blob."""

    class Missing(Exception):
        """A blob is not in `other`."""

    with (model.parent / data).open("rb") as old:

        def find(offset: int, length: int) -> int:
            digest = _digest(old, offset, length)
            if digest not in known.blobs:
                raise Missing
            return known.blobs[digest]

        try:
            graph = _relocate(model, data, target, new_data, find)
        except Missing:
            return None
    os.link(other, target.parent / new_data)
    return AlignedModel({target.name: graph, new_data: known.files[other.name]}, known.blobs)


def resolve_links(model: Path) -> tuple[bytes, Path] | None:
    """If the model or its files of weights are links, return the model with the paths of the files
    that the links lead to, and the folder to which these paths are relative: ONNX Runtime refuses
    weights outside the model's folder. None without links. Raises PassError if a file is
    missing."""
    content = model.read_bytes() if model.is_symlink() or _any_links(model.parent) else b""
    try:
        locations = set(_locations(content))
    except ValueError:  # no model, which ONNX Runtime reports
        return None
    if not locations or not (
        model.is_symlink() or any((model.parent / name).is_symlink() for name in locations)
    ):
        return None
    try:
        files = {name: (model.parent / name).resolve(strict=True) for name in locations}
    except OSError as error:
        raise PassError(
            f"{error.filename} is missing, weights of {model}; export the bundle again"
        ) from None
    folder = Path(os.path.commonpath([file.parent for file in files.values()]))
    places = {name: file.relative_to(folder).as_posix() for name, file in files.items()}

    def edit(entry: bytes) -> bytes:
        key, value = _entry(entry)
        value = places[value] if key == "location" else value
        return encode_field(KEY, key.encode()) + encode_field(VALUE, value.encode())

    def edit_tensor(tensor: bytes) -> bytes:
        return _replace_fields(tensor, EXTERNAL_DATA, edit)

    return _replace_fields(
        content, GRAPH, lambda graph: _replace_fields(graph, INITIALIZER, edit_tensor)
    ), folder


def _any_links(folder: Path) -> bool:
    return any(path.is_symlink() for path in folder.iterdir())


def _locations(model: bytes) -> Iterator[str]:
    """Yield the names of a model's files of weights."""
    for graph in _contents(model, GRAPH):
        for tensor in _contents(graph, INITIALIZER):
            for entry in _contents(tensor, EXTERNAL_DATA):
                key, value = _entry(entry)
                if key == "location":
                    yield value


Move = Callable[[int, int], int]
"""The new offset of a blob, from its old offset and its length."""


def _relocate(model: Path, data: str, target: Path, new_data: str, move: Move) -> FileInfo:
    """Write a copy of the model that finds its blobs where `move` says."""
    content = model.read_bytes()

    def edit_tensor(tensor: bytes) -> bytes:
        return _move_tensor(tensor, data, new_data, move)

    try:
        changed = _replace_fields(
            content, GRAPH, lambda graph: _replace_fields(graph, INITIALIZER, edit_tensor)
        )
    except UnknownFormat:
        raise
    except ValueError as error:  # an entry is not a number, or not UTF-8
        raise UnknownFormat(str(error)) from None
    if data.encode() in changed:
        raise UnknownFormat("it has weights besides the initializers of its graph")
    target.write_bytes(changed)
    return FileInfo(sha256=hashlib.sha256(changed).hexdigest(), bytes=len(changed))


def _pieces(file: BinaryIO, offset: int, length: int) -> Iterator[bytes]:
    """Read a blob in pieces. Raises UnknownFormat if the file does not have it."""
    if min(offset, length) < 0 or offset + length > os.fstat(file.fileno()).st_size:
        raise UnknownFormat(f"{length} bytes at {offset} are not in the file")
    file.seek(offset)
    for begin in range(0, length, PIECE_BYTES):
        yield file.read(min(length - begin, PIECE_BYTES))


def _digest(file: BinaryIO, offset: int, length: int) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(file, offset, length):
        digest.update(piece)
    return digest.hexdigest()


class _Blobs:
    """Copies blobs from one file to aligned offsets of another. offsets: the new offsets, by
    SHA-256."""

    def __init__(self, old: BinaryIO, new: BinaryIO, alignment: int) -> None:
        self._old, self._new, self._alignment = old, new, alignment
        self._size, self._digest = 0, hashlib.sha256()
        self.offsets: dict[str, int] = {}

    def move(self, offset: int, length: int) -> int:
        """The new offset of a blob. Equal blobs are copied once."""
        digest = _digest(self._old, offset, length)
        if digest not in self.offsets:
            self._write(bytes(-self._size % self._alignment))
            self.offsets[digest] = self._size
            for piece in _pieces(self._old, offset, length):
                self._write(piece)
        return self.offsets[digest]

    def info(self) -> FileInfo:
        return FileInfo(sha256=self._digest.hexdigest(), bytes=self._size)

    def _write(self, content: bytes) -> None:
        self._new.write(content)
        self._digest.update(content)
        self._size += len(content)


def _move_tensor(tensor: bytes, data: str, new_data: str, move: Move) -> bytes:
    """Change the offsets of a TensorProto's blobs, if it has external data."""
    entries = [_entry(content) for content in _contents(tensor, EXTERNAL_DATA)]
    if not entries:
        return tensor
    given = dict(entries)
    if given.get("location") != data or not {"offset", "length"} <= given.keys():
        raise UnknownFormat(f"an initializer has the external data {given}")

    def edit(content: bytes) -> bytes:
        key, value = _entry(content)
        if key == "location":
            value = new_data
        elif key == "offset":
            value = str(move(int(value), int(given["length"])))
        elif key.startswith("prepacked"):
            value = _move_prepacked(value, move)
        elif key != "length":
            raise UnknownFormat(f"an initializer has the external data {given}")
        return encode_field(KEY, key.encode()) + encode_field(VALUE, value.encode())

    return _replace_fields(tensor, EXTERNAL_DATA, edit)


def _move_prepacked(value: str, move: Move) -> str:
    """Change the offsets in the value of a `prepacked` entry."""
    name, *forms = value.split("|")
    moved = []
    for form in forms:
        offset, length, checksum = form.split(";")
        moved.append(f"{move(int(offset), int(length))};{length};{checksum}")
    return "|".join([name, *moved])


def _entry(content: bytes) -> tuple[str, str]:
    """Return the key and value of an entry of external data."""
    texts = {number: content[begin:end].decode() for number, _, begin, end in _fields(content)}
    return texts.get(KEY, ""), texts.get(VALUE, "")


def _contents(message: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the content of every field with the number `wanted`."""
    return (message[begin:end] for number, _, begin, end in _fields(message) if number == wanted)


def _replace_fields(message: bytes, wanted: int, edit: Callable[[bytes], bytes]) -> bytes:
    """Return a message with `edit` applied to the content of the fields with this number."""
    return b"".join(
        encode_field(number, edit(message[begin:end])) if number == wanted else message[start:end]
        for number, start, begin, end in _fields(message)
    )


def _fields(message: bytes) -> Iterator[Field]:
    at = 0
    while at < len(message):
        start = at
        tag, at = _decode_varint(message, at)
        kind, begin = tag & 7, at
        if kind == VARINT:
            _, at = _decode_varint(message, at)
        elif kind == DELIMITED:
            size, begin = _decode_varint(message, at)
            at = begin + size
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            at += 8 if kind == EIGHT_BYTES else 4
        else:
            raise UnknownFormat(f"a protobuf field of kind {kind}")
        if at > len(message):
            raise UnknownFormat("a protobuf field goes on after its message")
        yield tag >> 3, start, begin, at


def _decode_varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode a number of seven bits a byte, the lowest first. Returns it and where it ends."""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise UnknownFormat("a protobuf number has no end")
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 0x80:
            return value, at


def encode_field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message with delimited content."""
    return encode_varint(number << 3 | DELIMITED) + encode_varint(len(content)) + content


def encode_varint(value: int) -> bytes:
    """A number of seven bits a byte, the lowest first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
