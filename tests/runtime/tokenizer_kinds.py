"""Small tokenizers of every kind of decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<s>", "</s>"]
WORDS = ["a", "b", "ab", "(ab", ".", "n't", "é", "世", "\ufffd", "x"]
BYTES = [0x20, 0x41, 0x61, 0x80, 0x81, 0x82, 0x9F, 0xAC, 0xBD, 0xBF, 0xC0, 0xC3, 0xE2, 0xE3, 0xED, 0xEF, 0xF0, 0xF4, 0xFF]
"""With them come whole characters, beginnings of some, and bytes that begin none."""


def _alphabet() -> dict[int, str]:
    """The characters by which GPT-2 writes bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def _finished(tokenizer: Tokenizer, decoder: object) -> Tokenizer:
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<call>", normalized=False), AddedToken("é\u4e16", normalized=False)])
    tokenizer.decoder = decoder
    return tokenizer


def byte_level() -> Tokenizer:
    of_byte = _alphabet()
    texts = [bytes([byte]) for byte in range(256)] + [b" a", b"b\xe2", b"\x82\xac", b"\xe2\x82", b" \xf0\x9f", b"\xbd b"]
    vocabulary = {"".join(of_byte[byte] for byte in text): i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _finished(tokenizer, decoders.ByteLevel())


def _pieces(more: Sequence[str] = ()) -> list[str]:
    return ["<unk>", *WORDS, "\u2581", "\u2581a", "\u2581\u2581", "\u2581.", "a\u2581b", *more]


def byte_fallback(*, strip: int = 1) -> Tokenizer:
    """As Llama 2's and Mistral's; without `strip` as Gemma's."""
    pieces = _pieces([f"<0x{byte:02X}>" for byte in range(256)])
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _finished(tokenizer, decoders.Sequence([*steps, *([decoders.Strip(" ", strip, 0)] if strip else [])]))


def metaspace(scheme: str = "always") -> Tokenizer:
    model = models.BPE({piece: i for i, piece in enumerate(_pieces())}, [], unk_token="<unk>")
    return _finished(Tokenizer(model), decoders.Metaspace(prepend_scheme=scheme))


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS), "##", "do not"]
    model = models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    return _finished(Tokenizer(model), decoders.WordPiece())


def without_decoder() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(["<unk>", *WORDS])}, unk_token="<unk>"))
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
