"""The bytes that each token of a tokenizer adds to a text."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SHOWN = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_ALPHABET = {byte: byte for byte in _SHOWN} | {256 + i: byte for i, byte in enumerate(_HIDDEN)}
"""The bytes, by the characters with which byte-level tokenizers (GPT-2's) write them."""
_BEFORE = "a"
"""A token that may stand before any other one."""


def token_bytes(tokenizer: Tokenizer, count: int) -> list[bytes]:
    """What each id below `count` adds to a text that has other tokens before it: b"" if it is no token. Added tokens
    are their own text."""
    added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
    kinds = {step["type"] for step in _steps(json.loads(tokenizer.to_str())["decoder"])}
    table = []
    for number in range(count):
        piece = tokenizer.id_to_token(number)
        if piece is None:
            table.append(b"")
        elif number in added:
            table.append(added[number].encode())
        elif "ByteLevel" in kinds:
            table.append(_of_byte_level(piece))
        elif "ByteFallback" in kinds and (byte := _BYTE.fullmatch(piece)):
            table.append(bytes([int(byte[1], 16)]))
        else:
            pieces = [_BEFORE, piece]
            text = " ".join(pieces) if tokenizer.decoder is None else tokenizer.decoder.decode(pieces)
            table.append(text.removeprefix(_BEFORE).encode())
    return table


def _of_byte_level(piece: str) -> bytes:
    characters = [ord(character) for character in piece]
    if _ALPHABET.keys() >= set(characters):
        return bytes(_ALPHABET[character] for character in characters)
    return piece.encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoders of which a decoder is made."""
    if decoder is None:
        return []
    return [step for each in decoder.get("decoders", ()) for step in _steps(each)] or [decoder]
