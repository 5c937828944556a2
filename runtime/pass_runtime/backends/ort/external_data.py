"""Edits where an ONNX model finds its weights, which are blobs of bytes in files beside it: `align`
and `link` copy a model so that every blob begins at an aligned offset, and `resolve_links` follows
symbolic links.

The model is edited as the bytes of its protobuf
(https://protobuf.dev/programming-guides/encoding/), and only in the entries that say where a blob
is. Field 7 of a ModelProto is its graph, field 5 of a GraphProto an initializer (a tensor of
weights), field 13 of a TensorProto an entry of its external data, with the key in field 1 and the
value in field 2 (onnx.proto). ONNX Runtime adds entries whose key begins with `prepacked` and whose
value is NAME|offset;length;checksum|..., for the packed forms of the tensor that its kernels read.
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
"""The numbers of the fields that are named above."""
VARINT, EIGHT_BYTES, DELIMITED, FOUR_BYTES = 0, 1, 2, 5
"""Protobuf's wire types: how the content of a field is encoded."""
PIECE_BYTES = 1 << 22
"""Blobs are read in pieces of this size."""

Field = tuple[int, int, int, int]
"""A field's number, and the offsets at which the field, its content, and the next field begin."""


class UnknownFormat(ValueError):
    """The model is not as ONNX Runtime writes it."""


@dataclass(frozen=True)
class AlignedModel:
    """Describes a model and its weights that `align` or `link` wrote. files: name of a file -> its
    size and hash. blobs: SHA-256 of a blob -> its offset in the file of weights."""

    files: Mapping[str, FileInfo]
    blobs: Mapping[str, int]


def align(model: Path, data: str, target: Path, new_data: str, alignment: int) -> AlignedModel:
    """Copy `model` to `target`, and its weights from the file `data` beside `model` to the file
    `new_data` beside `target`, each blob to a multiple of `alignment` bytes. Raises UnknownFormat
    if `model` has other weights too, or is not as ONNX Runtime writes models."""
    with (model.parent / data).open("rb") as old, (target.parent / new_data).open("xb") as new:
        blobs = _Blobs(old, new, alignment)
        graph = _relocate(model, data, target, new_data, blobs.move)
    return AlignedModel({target.name: graph, new_data: blobs.info()}, blobs.offsets)


def link(
    model: Path, data: str, target: Path, new_data: str, other: Path, described: AlignedModel
) -> AlignedModel | None:
    """Do as `align`, but make `new_data` a hard link to the file of weights `other`, which
    `described` describes. Return None if a blob is not in `other`."""

    class Missing(Exception):
        """A blob is not in `other`."""

    with (model.parent / data).open("rb") as old:

        def find(offset: int, length: int) -> int:
            digest = _digest(old, offset, length)
            if digest not in described.blobs:
                raise Missing
            return described.blobs[digest]

        try:
            graph = _relocate(model, data, target, new_data, find)
        except Missing:
            return None
    os.link(other, target.parent / new_data)
    files = {target.name: graph, new_data: described.files[other.name]}
    return AlignedModel(files, described.blobs)


def resolve_links(model: Path) -> tuple[bytes, Path] | None:
    """If the model or its files of weights are symbolic links, return the model's bytes with the
    paths of the real files, and the folder to which these paths are relative; else None. ONNX
    Runtime refuses weights outside the model's folder. Raises PassError if a file is missing."""
    if not any(path.is_symlink() for path in model.parent.iterdir()):
        return None
    content = model.read_bytes()
    try:
        locations = set(_locations(content))
    except ValueError:  # It is not a model, which ONNX Runtime will report.
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
    paths = {name: file.relative_to(folder).as_posix() for name, file in files.items()}

    def edit(entry: bytes) -> bytes:
        key, value = _entry(entry)
        return _encode_entry(key, paths[value] if key == "location" else value)

    return _edit_tensors(content, lambda each: _replace_fields(each, EXTERNAL_DATA, edit)), folder


def _edit_tensors(model: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """Return a model with `edit` applied to each TensorProto among its graph's initializers."""
    return _replace_fields(model, GRAPH, lambda graph: _replace_fields(graph, INITIALIZER, edit))


def _locations(model: bytes) -> Iterator[str]:
    """Yield the names of a model's files of weights."""
    for graph in _contents(model, GRAPH):
        for tensor in _contents(graph, INITIALIZER):
            for entry in _contents(tensor, EXTERNAL_DATA):
                key, value = _entry(entry)
                if key == "location":
                    yield value


Move = Callable[[int, int], int]
"""A function that returns a blob's new offset. Arguments: its old offset and its length."""


def _relocate(model: Path, data: str, target: Path, new_data: str, move: Move) -> FileInfo:
    """Write a copy of the model that reads its blobs from `new_data`, at the offsets of `move`."""

    def edit_tensor(tensor: bytes) -> bytes:
        return _move_tensor(tensor, data, new_data, move)

    try:
        changed = _edit_tensors(model.read_bytes(), edit_tensor)
    except UnknownFormat:
        raise
    except ValueError as error:  # An entry is not a number, or is not UTF-8.
        raise UnknownFormat(str(error)) from None
    if data.encode() in changed:
        raise UnknownFormat("it has weights besides the initializers of its graph")
    target.write_bytes(changed)
    return FileInfo(sha256=hashlib.sha256(changed).hexdigest(), bytes=len(changed))


def _pieces(file: BinaryIO, offset: int, length: int) -> Iterator[bytes]:
    """Yield a blob in pieces. Raises UnknownFormat if the file does not have all of it."""
    if min(offset, length) < 0 or offset + length > os.fstat(file.fileno()).st_size:
        raise UnknownFormat(f"{length} bytes at {offset} are not in the file")
    file.seek(offset)
    for begin in range(0, length, PIECE_BYTES):
        yield file.read(min(length - begin, PIECE_BYTES))


def _digest(file: BinaryIO, offset: int, length: int) -> str:
    """Return the SHA-256 of a blob."""
    digest = hashlib.sha256()
    for piece in _pieces(file, offset, length):
        digest.update(piece)
    return digest.hexdigest()


class _Blobs:
    """Copies blobs from one file to aligned offsets of another. offsets: SHA-256 -> new offset."""

    def __init__(self, old: BinaryIO, new: BinaryIO, alignment: int) -> None:
        self._old, self._new, self._alignment = old, new, alignment
        self._size, self._digest = 0, hashlib.sha256()  # of the new file
        self.offsets: dict[str, int] = {}

    def move(self, offset: int, length: int) -> int:
        """Copy a blob unless an equal one was copied, and return its new offset."""
        digest = _digest(self._old, offset, length)
        if digest not in self.offsets:
            self._write(bytes(-self._size % self._alignment))
            self.offsets[digest] = self._size
            for piece in _pieces(self._old, offset, length):
                self._write(piece)
        return self.offsets[digest]

    def info(self) -> FileInfo:
        """Return the size and hash of the new file."""
        return FileInfo(sha256=self._digest.hexdigest(), bytes=self._size)

    def _write(self, content: bytes) -> None:
        self._new.write(content)
        self._digest.update(content)
        self._size += len(content)


def _move_tensor(tensor: bytes, data: str, new_data: str, move: Move) -> bytes:
    """Return a TensorProto with the new file and offsets of its blobs, if it has external data."""
    entries = dict(_entry(content) for content in _contents(tensor, EXTERNAL_DATA))
    if not entries:
        return tensor
    if entries.get("location") != data or not {"offset", "length"} <= entries.keys():
        raise UnknownFormat(f"an initializer has the external data {entries}")

    def edit(content: bytes) -> bytes:
        key, value = _entry(content)
        if key == "location":
            value = new_data
        elif key == "offset":
            value = str(move(int(value), int(entries["length"])))
        elif key.startswith("prepacked"):
            value = _move_prepacked(value, move)
        elif key != "length":
            raise UnknownFormat(f"an initializer has the external data {entries}")
        return _encode_entry(key, value)

    return _replace_fields(tensor, EXTERNAL_DATA, edit)


def _move_prepacked(value: str, move: Move) -> str:
    """Return the value of a `prepacked` entry with the new offsets of its blobs."""
    name, *blobs = value.split("|")
    moved = []
    for blob in blobs:
        offset, length, checksum = blob.split(";")
        moved.append(f"{move(int(offset), int(length))};{length};{checksum}")
    return "|".join([name, *moved])


def _entry(content: bytes) -> tuple[str, str]:
    """Return the key and value of an entry of external data."""
    texts = {number: content[begin:end].decode() for number, _, begin, end in _fields(content)}
    return texts.get(KEY, ""), texts.get(VALUE, "")


def _encode_entry(key: str, value: str) -> bytes:
    return encode_field(KEY, key.encode()) + encode_field(VALUE, value.encode())


def _contents(message: bytes, field: int) -> Iterator[bytes]:
    """Yield the content of every field with the number `field`."""
    return (message[begin:end] for number, _, begin, end in _fields(message) if number == field)


def _replace_fields(message: bytes, field: int, edit: Callable[[bytes], bytes]) -> bytes:
    """Return a message with `edit` applied to the content of the fields with the number `field`."""
    return b"".join(
        encode_field(number, edit(message[begin:end])) if number == field else message[start:end]
        for number, start, begin, end in _fields(message)
    )


def _fields(message: bytes) -> Iterator[Field]:
    """Yield where the fields of a message are. Raises UnknownFormat if it is not a message."""
    offset = 0
    while offset < len(message):
        start = offset
        tag, offset = _decode_varint(message, offset)
        wire_type, begin = tag & 7, offset
        if wire_type == VARINT:
            _, offset = _decode_varint(message, offset)
        elif wire_type == DELIMITED:
            size, begin = _decode_varint(message, offset)
            offset = begin + size
        elif wire_type in (EIGHT_BYTES, FOUR_BYTES):
            offset += 8 if wire_type == EIGHT_BYTES else 4
        else:
            raise UnknownFormat(f"a protobuf field of wire type {wire_type}")
        if offset > len(message):
            raise UnknownFormat("a protobuf field goes on after its message")
        yield tag >> 3, start, begin, offset


def _decode_varint(message: bytes, offset: int) -> tuple[int, int]:
    """Decode a number of seven bits a byte, the lowest first, and return it and where it ends."""
    value = shift = 0
    while True:
        if offset >= len(message) or shift > 63:
            raise UnknownFormat("a protobuf number has no end")
        value |= (message[offset] & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if message[offset - 1] < 0x80:
            return value, offset


def encode_field(number: int, content: bytes) -> bytes:
    """Encode a field of a protobuf message with delimited content."""
    return encode_varint(number << 3 | DELIMITED) + encode_varint(len(content)) + content


def encode_varint(value: int) -> bytes:
    """Encode a number of seven bits a byte, the lowest first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
