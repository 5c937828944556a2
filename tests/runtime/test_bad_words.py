"""A token is forbidden exactly if the text with it would contain a bad word."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import TOKENIZERS, byte_fallback, whole
from tokenizers import Tokenizer

from pass_runtime.errors import PassError
from pass_runtime.options import MAX_BAD_WORD_BYTES, GenerateOptions
from pass_runtime.text.bad_words import ROOT, BadWords, TokenIndex
from pass_runtime.text.detokenizer import Vocabulary

INDICES = {
    name: TokenIndex(Vocabulary(tokenizer).all_bytes(tokenizer.get_vocab_size() + 3))
    for name, tokenizer in TOKENIZERS.items()
}
LETTERS = st.text(["a", "b", "(", " ", "\n", ".", "x", "A", "é", "世", "€"], min_size=1, max_size=4)


def allowed(words: BadWords, state: int) -> list[int]:
    bits = np.unpackbits(words.forbidden(state).astype("<u4").view(np.uint8), bitorder="little")
    return [token for token in range(len(words._index.texts)) if not bits[token]]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(derandomize=True, deadline=None, max_examples=20)
@given(listed=st.lists(LETTERS, min_size=1, max_size=4), seed=st.integers(0, 1 << 32))
def test_tokens_that_would_write_a_word_are_forbidden(name: str, listed: list[str], seed: int):
    """Along a random text of allowed tokens, after a prompt that does not count."""
    draw, index = random.Random(seed), INDICES[name]
    words, state = BadWords(index, [word.encode() for word in listed]), ROOT
    tokenizer = TOKENIZERS[name]
    prompt = [tokenizer.token_to_id("ab" if name != "byte-level" else "a")]
    start, tokens = len(whole(name, prompt, cut=False)), list(prompt)
    ids = range(len(index.texts))
    parts = {t for t in ids if any(index.texts[t] in word.encode() for word in listed)}
    for _ in range(5):
        permitted = allowed(words, state)
        texts = [whole(name, [*tokens, token], cut=True)[start:] for token in ids]
        assert permitted == [t for t in ids if not any(word in texts[t] for word in listed)]
        likely = [token for token in permitted if token in parts and index.texts[token]]
        tokens.append(draw.choice(likely if likely and draw.random() < 0.8 else permitted))
        state = words.follow(state, tokens[-1])


def spelled(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    return [tokenizer.token_to_id(piece) for piece in pieces]


def test_words_in_the_middle_of_tokens_over_tokens_and_over_special_ones():
    tokenizer = byte_fallback()
    words = BadWords(INDICES["byte-fallback"], [b"ab", b" a.", b"\nb"])
    (inside,) = spelled(tokenizer, "(ab")
    assert inside not in allowed(words, ROOT)
    for before, last in (
        (["a"], "b"),
        (["a"], "<0x62>"),
        (["a", "<s>"], "b"),
        (["▁a"], "."),
        (["<0x20>", "a"], "."),
        (["<0x0A>"], "b"),
    ):
        state = ROOT
        for token in spelled(tokenizer, *before):
            assert token in allowed(words, state)
            state = words.follow(state, token)
        (completing,) = spelled(tokenizer, last)
        assert completing not in allowed(words, state)
        assert completing in allowed(words, ROOT)


def test_a_character_of_bytes_is_completed_by_the_last_one():
    words = BadWords(INDICES["byte-level"], ["€".encode()])
    state = words.follow(words.follow(ROOT, 0xE2), 0x82)
    assert {0xAC} == set(range(256)) - set(allowed(words, state))
    assert set(range(256)) <= set(allowed(words, words.follow(state, 0x41)))


def test_the_index_finds_what_a_search_finds():
    generator = random.Random(3)
    texts = [bytes(generator.choices(b"ab\x00\xff", k=generator.randint(0, 9))) for _ in range(500)]
    index = TokenIndex(texts)
    for size in range(1, 7):
        for _ in range(60):
            text = bytes(generator.choices(b"ab\x00\xff", k=size))
            first, end = index.beginning_with(text)
            beginning = {i for i, each in enumerate(texts) if each.startswith(text)}
            assert set(index.order[first:end]) == beginning
            containing = {i for i, each in enumerate(texts) if text in each}
            assert set(index.containing(text)) == containing


def test_bad_words_are_limited_in_bytes_and_have_no_lone_surrogates():
    assert GenerateOptions(bad_words=["x" * MAX_BAD_WORD_BYTES]).bad_words
    with pytest.raises(PassError, match="at most 16384 bytes together, not 16386"):
        GenerateOptions(bad_words=["xé" * 5462])
    with pytest.raises(PassError, match="without lone surrogates"):
        GenerateOptions(bad_words=["a\ud800"])
