"""Follows symbolic links to a model's files of weights. ONNX Runtime maps these files into memory,
but refuses those outside the model's folder.

The model is edited as the bytes of its protobuf
(https://protobuf.dev/programming-guides/encoding/). onnx.proto has the numbers of its fields.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pass_runtime.errors import PassError

EXTERNAL_DATA = (7, 5, 13)
"""The graph of a ModelProto, its initializers, and their entries of external data."""
KEY, VALUE = 1, 2
"""The fields of an entry."""
VARINT, EIGHT_BYTES, DELIMITED, FOUR_BYTES = 0, 1, 2, 5
"""Protobuf's wire types: how the content of a field is encoded."""


def resolve_links(model: Path) -> tuple[bytes, Path] | None:
    """If the model or its files of weights are symbolic links, return the model's bytes with the
    paths of the real files, and the folder to which these paths are relative; else None. Raises
    PassError if a file is missing."""
    if not any(path.is_symlink() for path in model.parent.iterdir()):
        return None
    content, names = model.read_bytes(), dict[str, str]()
    try:
        _relocate(content, lambda name: names.setdefault(name, name))
        if not names or not any(
            path.is_symlink() for path in (model, *(model.parent / name for name in names))
        ):
            return None
        files = {name: (model.parent / name).resolve(strict=True) for name in names}
    except ValueError:  # It is not a model, which ONNX Runtime will report.
        return None
    except OSError as error:
        raise PassError(
            f"{error.filename} is missing, weights of {model}; export the bundle again"
        ) from None
    folder = Path(os.path.commonpath([file.parent for file in files.values()]))
    return _relocate(content, lambda name: files[name].relative_to(folder).as_posix()), folder


def _relocate(model: bytes, rename: Callable[[str], str]) -> bytes:
    """Return the model with other names of its files of weights. Raises ValueError if it is not a
    model."""

    def edit(entry: bytes) -> bytes:
        texts = {number: content.decode() for number, _, content in _fields(entry)}
        if texts.get(KEY) != "location":
            return entry
        return _encode(KEY, b"location") + _encode(VALUE, rename(texts[VALUE]).encode())

    return _edit(model, EXTERNAL_DATA, edit)


def _edit(message: bytes, path: Sequence[int], edit: Callable[[bytes], bytes]) -> bytes:
    """Return the message with `edit` applied to the fields at `path`, the numbers of nested
    fields."""
    if not path:
        return edit(message)
    return b"".join(
        _encode(number, _edit(content, path[1:], edit)) if number == path[0] else field
        for number, field, content in _fields(message)
    )


def _fields(message: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield each field of a message: its number, all its bytes, and its content."""
    offset = 0
    while offset < len(message):
        tag, begin = _decode_varint(message, offset)
        end = begin
        if (wire_type := tag & 7) == VARINT:
            _, end = _decode_varint(message, begin)
        elif wire_type == DELIMITED:
            size, begin = _decode_varint(message, begin)
            end = begin + size
        elif wire_type in (EIGHT_BYTES, FOUR_BYTES):
            end += 8 if wire_type == EIGHT_BYTES else 4
        else:
            raise ValueError(f"a protobuf field of wire type {wire_type}")
        if end > len(message):
            raise ValueError("a protobuf field goes on after its message")
        yield tag >> 3, message[offset:end], message[begin:end]
        offset = end


def _decode_varint(message: bytes, offset: int) -> tuple[int, int]:
    """Decode a number of seven bits a byte, the lowest first, and return it and where it ends."""
    value = shift = 0
    while True:
        if offset >= len(message) or shift > 63:
            raise ValueError("a protobuf number has no end")
        value |= (message[offset] & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if message[offset - 1] < 0x80:
            return value, offset


def _encode(number: int, content: bytes) -> bytes:
    """Encode a field with delimited content."""
    return _encode_varint(number << 3 | DELIMITED) + _encode_varint(len(content)) + content


def _encode_varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
