"""Small tokenizers with every kind of decoder, and how their library decodes with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<s>", "</s>"]
WORDS = ["a", "b", "ab", "(ab", ".", "n't", "é", "世", "\ufffd", "x"]
BYTES = list(bytes.fromhex("20 41 61 80 81 82 9F AC BD BF C0 C3 E2 E3 ED EF F0 F4 FF"))
"""They make whole characters, beginnings of characters, and bytes that are part of none."""


def _alphabet() -> dict[int, str]:
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {
        byte: chr(256 + i) for i, byte in enumerate(hidden)
    }


def _finished(tokenizer: Tokenizer, decoder: object) -> Tokenizer:
    tokenizer.add_special_tokens(SPECIAL)
    words = ("<call>", "é\u4e16")
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.decoder = decoder
    return tokenizer


def byte_level() -> Tokenizer:
    of_byte = _alphabet()
    texts = [bytes([byte]) for byte in range(256)]
    texts += [b" a", b"b\xe2", b"\x82\xac", b"\xe2\x82", b" \xf0\x9f", b"\xbd b"]
    vocabulary = {"".join(of_byte[byte] for byte in text): i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _finished(tokenizer, decoders.ByteLevel())


def _pieces(words: Sequence[str], others: Sequence[str] = ()) -> list[str]:
    return ["<unk>", *words, "\u2581", "\u2581a", "\u2581\u2581", "\u2581.", "a\u2581b", *others]


def byte_fallback(words: Sequence[str] = WORDS, *, strip: int = 1) -> Tokenizer:
    """As Llama 2 and Mistral have it, or Gemma. strip: spaces that are removed at the beginning."""
    pieces = _pieces(words, [f"<0x{byte:02X}>" for byte in range(256)])
    ids = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(ids, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    last = [decoders.Strip(" ", strip, 0)] if strip else []
    return _finished(tokenizer, decoders.Sequence([*steps, *last]))


def metaspace(scheme: str = "always", words: Sequence[str] = WORDS) -> Tokenizer:
    ids = {piece: i for i, piece in enumerate(_pieces(words))}
    model = models.BPE(ids, [], unk_token="<unk>")
    return _finished(Tokenizer(model), decoders.Metaspace(prepend_scheme=scheme))


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS), "##", "do not"]
    model = models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    return _finished(Tokenizer(model), decoders.WordPiece())


def without_decoder() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(["<unk>", *WORDS])}, unk_token="<unk>")
    )
    return _finished(tokenizer, None)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "byte-fallback, nothing stripped": lambda: byte_fallback(strip=0),
    "byte-fallback, two stripped": lambda: byte_fallback(strip=2),
    "metaspace": metaspace,
    "metaspace, nothing prepended": lambda: metaspace("never"),
    "word pieces": word_piece,
    "no decoder": without_decoder,
}
TOKENIZERS = {name: make() for name, make in KINDS.items()}
OF_BYTE = re.compile("<0x(..)>")
BYTE_OF = {character: byte for byte, character in _alphabet().items()}


def byte_of(name: str, piece: str) -> bytes | None:
    match = OF_BYTE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match and name.startswith("byte-fallback") else None


def begins_a_character(data: bytes) -> bool:
    endings = [bytes([byte]) * count for byte in (0x80, 0xBF) for count in (1, 2, 3)]
    return bool(data) and any(is_character(data + ending) for ending in endings)


def is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def whole(name: str, tokens: list[int], *, cut: bool) -> str:
    """cut: without an incomplete last character.

    The decoder for byte fallback turns a run of bytes into U+FFFD if one of them is part of no
    character. An empty token after every character ends a run.
    """
    tokenizer = TOKENIZERS[name]
    if name == "byte-level":
        text = tokenizer.decode(tokens)
        end = b"".join(bytes_of_byte_level(tokenizer, token) for token in tokens)[-3:]
        incomplete = any(begins_a_character(end[start:]) for start in range(len(end)))
        return text[:-1] if cut and incomplete else text
    if not name.startswith("byte-fallback"):
        return tokenizer.decode(tokens)
    pieces = [
        piece
        for token in tokens
        if (piece := tokenizer.id_to_token(token)) is not None and piece not in SPECIAL
    ]
    parts: list[str] = []
    while pieces:
        # A character has at most four bytes. sizes: how many pieces from the first on are bytes.
        of_bytes = [byte_of(name, piece) for piece in pieces[:4]]
        sizes = [size for size in range(1, 1 + len(of_bytes)) if None not in of_bytes[:size]]
        size = next((size for size in sizes if is_character(b"".join(of_bytes[:size]))), 1)
        if cut and len(pieces) in sizes and size == 1 and begins_a_character(b"".join(of_bytes)):
            break
        parts += [*pieces[:size], ""]
        pieces = pieces[size:]
    return tokenizer.decoder.decode(parts)


def bytes_of_byte_level(tokenizer: Tokenizer, token: int) -> bytes:
    piece = tokenizer.id_to_token(token)
    if piece is None or piece in SPECIAL:
        return b""
    return bytes(BYTE_OF[c] for c in piece) if all(c in BYTE_OF for c in piece) else piece.encode()
