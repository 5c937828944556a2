"""Copies a model whose weights lie in a file beside it, so that every blob of them begins at an aligned offset.

Only the entries that say where a blob lies are changed, in the protobuf's bytes
(https://protobuf.dev/programming-guides/encoding/): field 7 of a ModelProto is its graph, field 5 of a GraphProto an
initializer, field 13 of a TensorProto an entry of its external data, with the key in field 1 and the value in field 2
(onnx.proto). ONNX Runtime adds entries whose key begins with `prepacked` and whose value is
NAME|offset;length;checksum|..., for the forms of the tensor that its kernels read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pass_runtime.bundle.manifest import FileInfo

GRAPH, INITIALIZER, EXTERNAL_DATA, KEY, VALUE = 7, 5, 13, 1, 2
VARINT, EIGHT_BYTES, DELIMITED, FOUR_BYTES = 0, 1, 2, 5
PIECE = 1 << 22

Field = tuple[int, int, int, int]
"""A field's number, where it begins, where its content begins, and where it ends."""


class UnknownForm(ValueError):
    """The model is not as ONNX Runtime writes it."""


def align(model: Path, data: str, target: Path, new_data: str, alignment: int) -> dict[str, FileInfo]:
    """Write a copy of `model`, whose weights are all in the file `data` beside it, as `target`, with the weights in
    `new_data` beside that. Returns the sizes and hashes of the two, by name. UnknownForm for other models."""
    try:
        return _align(model, data, target, new_data, alignment)
    except UnknownForm:
        raise
    except ValueError as error:  # no number, or no text
        raise UnknownForm(str(error)) from None


def _align(model: Path, data: str, target: Path, new_data: str, alignment: int) -> dict[str, FileInfo]:
    content = model.read_bytes()
    with (model.parent / data).open("rb") as old, (target.parent / new_data).open("xb") as new:
        blobs = _Blobs(old, new, alignment)

        def edit_tensor(tensor: bytes) -> bytes:
            return _moved(tensor, data, new_data, blobs.move)

        changed = _replaced(content, GRAPH, lambda graph: _replaced(graph, INITIALIZER, edit_tensor))
    if data.encode() in changed:
        raise UnknownForm("it has weights besides the initializers of its graph")
    target.write_bytes(changed)
    described = FileInfo(sha256=hashlib.sha256(changed).hexdigest(), bytes=len(changed))
    return {target.name: described, new_data: blobs.info()}


class _Blobs:
    """Copies blobs from one file to aligned offsets of another."""

    def __init__(self, old: BinaryIO, new: BinaryIO, alignment: int) -> None:
        self._old, self._new, self._alignment = old, new, alignment
        self._available = os.fstat(old.fileno()).st_size
        self._size, self._digest = 0, hashlib.sha256()

    def move(self, offset: int, length: int) -> int:
        """The new offset of a blob."""
        if min(offset, length) < 0 or offset + length > self._available:
            raise UnknownForm(f"{length} bytes at {offset} are not in the file")
        self._write(bytes(-self._size % self._alignment))
        begin = self._size
        self._old.seek(offset)
        while left := begin + length - self._size:
            self._write(self._old.read(min(left, PIECE)))
        return begin

    def info(self) -> FileInfo:
        return FileInfo(sha256=self._digest.hexdigest(), bytes=self._size)

    def _write(self, content: bytes) -> None:
        self._new.write(content)
        self._digest.update(content)
        self._size += len(content)


def _moved(tensor: bytes, data: str, new_data: str, move: Callable[[int, int], int]) -> bytes:
    """A TensorProto whose blobs were moved; one with its values inside stays as it is."""
    entries = [_entry(tensor[begin:end]) for number, _, begin, end in _fields(tensor) if number == EXTERNAL_DATA]
    if not entries:
        return tensor
    given = dict(entries)
    if given.get("location") != data or not {"offset", "length"} <= given.keys():
        raise UnknownForm(f"an initializer has the external data {given}")

    def edit(content: bytes) -> bytes:
        key, value = _entry(content)
        if key == "location":
            value = new_data
        elif key == "offset":
            value = str(move(int(value), int(given["length"])))
        elif key.startswith("prepacked"):
            value = _moved_forms(value, move)
        elif key != "length":
            raise UnknownForm(f"an initializer has the external data {given}")
        return _delimited(KEY, key.encode()) + _delimited(VALUE, value.encode())

    return _replaced(tensor, EXTERNAL_DATA, edit)


def _moved_forms(value: str, move: Callable[[int, int], int]) -> str:
    name, *forms = value.split("|")
    moved = []
    for form in forms:
        offset, length, checksum = form.split(";")
        moved.append(f"{move(int(offset), int(length))};{length};{checksum}")
    return "|".join([name, *moved])


def _entry(content: bytes) -> tuple[str, str]:
    found = {number: content[begin:end].decode() for number, _, begin, end in _fields(content)}
    return found.get(KEY, ""), found.get(VALUE, "")


def _replaced(message: bytes, wanted: int, edit: Callable[[bytes], bytes]) -> bytes:
    """A message with edit(content) in place of the content of every field `wanted`."""
    parts = []
    for number, start, begin, end in _fields(message):
        parts.append(_delimited(number, edit(message[begin:end])) if number == wanted else message[start:end])
    return b"".join(parts)


def _fields(message: bytes) -> Iterator[Field]:
    at = 0
    while at < len(message):
        start = at
        tag, at = _varint(message, at)
        kind, begin = tag & 7, at
        if kind == VARINT:
            _, at = _varint(message, at)
        elif kind == DELIMITED:
            size, begin = _varint(message, at)
            at = begin + size
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            at += 8 if kind == EIGHT_BYTES else 4
        else:
            raise UnknownForm(f"a protobuf field of kind {kind}")
        if at > len(message):
            raise UnknownForm("a protobuf field goes on after its message")
        yield tag >> 3, start, begin, at


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise UnknownForm("a protobuf number has no end")
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if message[at - 1] < 0x80:
            return value, at


def _delimited(number: int, content: bytes) -> bytes:
    return _number(number << 3 | DELIMITED) + _number(len(content)) + content


def _number(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
