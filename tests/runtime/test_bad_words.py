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
BAD_WORDS = st.text(
    ["a", "b", "(", " ", "\n", ".", "x", "A", "é", "世", "€"], min_size=1, max_size=4
)


def allowed(words: BadWords, state: int) -> list[int]:
    bits = np.unpackbits(words.forbidden(state).astype("<u4").view(np.uint8), bitorder="little")
    return [token for token in range(len(words._index.texts)) if not bits[token]]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(derandomize=True, deadline=None, max_examples=20)
@given(listed=st.lists(BAD_WORDS, min_size=1, max_size=4), seed=st.integers(0, 1 << 32))
def test_tokens_that_would_write_a_word_are_forbidden(name: str, listed: list[str], seed: int):
    chance, index = random.Random(seed), INDICES[name]
    words, state = BadWords(index, [word.encode() for word in listed]), ROOT
    tokenizer = TOKENIZERS[name]
    prompt = [tokenizer.token_to_id("ab" if name != "byte-level" else "a")]
    start, tokens = len(whole(name, prompt, cut=False)), list(prompt)
    ids = range(len(index.texts))
    # Most tokens are parts of bad words: others would rarely write the beginning of one.
    parts = {t for t in ids if any(index.texts[t] in word.encode() for word in listed)}
    for _ in range(5):
        permitted = allowed(words, state)
        texts = [whole(name, [*tokens, token], cut=True)[start:] for token in ids]
        assert permitted == [t for t in ids if not any(word in texts[t] for word in listed)]
        likely = [token for token in permitted if token in parts and index.texts[token]]
        tokens.append(chance.choice(likely if likely and chance.random() < 0.8 else permitted))
        state = words.follow(state, tokens[-1])


def spelled(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    return [tokenizer.token_to_id(piece) for piece in pieces]


def test_a_word_may_lie_within_a_token_or_be_split_by_special_tokens():
    tokenizer = byte_fallback()
    words = BadWords(INDICES["byte-fallback"], [b"ab", b" a.", b"\nb"])
    (containing,) = spelled(tokenizer, "(ab")
    assert containing not in allowed(words, ROOT)
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


def test_of_a_character_in_byte_tokens_the_last_byte_is_forbidden():
    words = BadWords(INDICES["byte-level"], ["€".encode()])
    state = words.follow(words.follow(ROOT, 0xE2), 0x82)  # the first two bytes of the euro sign
    assert {0xAC} == set(range(256)) - set(allowed(words, state))
    assert set(range(256)) <= set(allowed(words, words.follow(state, 0x41)))


def test_the_index_finds_the_texts_that_begin_with_or_contain_a_text():
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
    with pytest.raises(PassError, match="16384 bytes together; there are 1, of 16386 bytes"):
        GenerateOptions(bad_words=["xé" * 5462])
    with pytest.raises(PassError, match="without lone surrogates"):
        GenerateOptions(bad_words=["a\ud800"])
