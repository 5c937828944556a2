"""Constraints with every kind of tokenizer: the bytes of tokens, and text that spells an added
token, which must be written with ordinary tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_kinds import byte_fallback, byte_level, metaspace
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pass_runtime.errors import PassError
from pass_runtime.text.compiler import PlainTokenizer
from pass_runtime.text.constraint import Constraint
from pass_runtime.text.grammar import Grammars
from pass_server.turns import marker_terminals

LETTERS = sorted(set("abcdefghijklmnopqrstuvwxyzABCDEFG0123456789.,!?{}[]\":'-_()<>/|\n"))
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
MARKS = ("</s>", "<|im_end|>", "<think>", "<s>")
"""The added tokens that constraints of the tests spell."""


def prepending() -> Tokenizer:
    """As Llama 2 has it: a space before every text."""
    tokenizer = byte_fallback(LETTERS)
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def spaced() -> Tokenizer:
    tokenizer = metaspace(words=LETTERS)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def unigram() -> Tokenizer:
    pieces = [(word, -1.0) for word in ("<unk>", "▁", *LETTERS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["<unk>", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


KINDS = (byte_level, prepending, spaced, unigram, word_piece)


def with_added_tokens(make) -> tuple[Tokenizer, int]:
    """Return a tokenizer and the id of its end token."""
    tokenizer = make()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer, tokenizer.token_to_id("</s>")


@pytest.fixture(scope="module", params=KINDS, ids=lambda make: make.__name__)
def tokenizer_and_grammars(request):
    tokenizer, end = with_added_tokens(request.param)
    # Models may have more ids than their tokenizers, here 5.
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size() + 5, [end])
    yield tokenizer, grammars
    grammars.close()


def write_at_random(tokenizer_and_grammars, constraint: Constraint) -> tuple[list[int], str]:
    tokenizer, grammars = tokenizer_and_grammars
    state, chance = grammars.start(constraint), random.Random(1)
    size, end = tokenizer.get_vocab_size() + 5, tokenizer.token_to_id("</s>")
    tokens: list[int] = []
    table = PlainTokenizer(tokenizer, size, [end]).tokens
    while len(tokens) < 400:
        forced = state.forced()
        allowed = np.zeros((1, -(-size // 32)), np.uint32)
        state.fill(allowed, ())
        bits = np.unpackbits(allowed.astype("<u4").view(np.uint8), bitorder="little")
        choices = np.flatnonzero(bits[:size]).tolist()
        # A forced token is the only one that is allowed.
        assert not forced or choices == [forced[0]]
        token = chance.choice(choices)
        if token == end:
            break
        tokens.append(token)
        state.advance(token)
    return tokens, b"".join(table[token] for token in tokens).decode()


def schema(key: str, value: object) -> dict:
    return {
        "type": "object",
        "properties": {key: {"const": value}},
        "required": [key],
        "additionalProperties": False,
    }


SPELLINGS = {
    "const": lambda mark: ({"json_schema": {"const": mark}}, f'"{mark}"'),
    "one-enum": lambda mark: ({"json_schema": {"enum": [f"a{mark}b"]}}, f'"a{mark}b"'),
    "key": lambda mark: ({"json_schema": schema(mark, 1)}, f'{{"{mark}": 1}}'),
    "choice": lambda mark: ({"choice": [mark]}, mark),
    "regex": lambda mark: ({"regex": mark.replace("|", r"\|") + "x"}, mark + "x"),
    "grammar": lambda mark: ({"grammar": f'start: "a" "{mark}"'}, "a" + mark),
    "schema in grammar": lambda m: ({"grammar": f'start: %json {{"const": "{m}"}}'}, f'"{m}"'),
}
"""By kind: makes of a mark the fields of a constraint, and the only text that it allows."""


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
def test_text_that_spells_an_added_token_is_text(tokenizer_and_grammars, mark, spell):
    fields, expected = spell(mark)
    tokens, text = write_at_random(tokenizer_and_grammars, Constraint(**fields))
    assert text == expected
    assert not set(tokens) & tokenizer_and_grammars[0].get_added_tokens_decoder().keys()


@pytest.mark.parametrize("mark", MARKS[1:])
def test_an_added_token_that_a_grammar_names_is_written_as_that_token(tokenizer_and_grammars, mark):
    """The grammars of tool calls name such tokens."""
    tokenizer, _ = tokenizer_and_grammars
    constraint = Constraint(grammar=f'start: "a" {marker_terminals(tokenizer)(mark)} "b"')
    tokens, _ = write_at_random(tokenizer_and_grammars, constraint)
    assert tokenizer.token_to_id(mark) in tokens
    assert len(tokens) == 3


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@settings(max_examples=40, deadline=None)
@example("a<|im_end|>")
@example("  a  b")
@example("é\U0001f600")
@given(st.text(st.sampled_from([*LETTERS, " ", "é", "\U0001f600"]), max_size=20))
def test_the_tokens_of_a_text_have_its_bytes(make, text):
    """A text is tokenized up to the first byte without a token."""
    tokenizer, end = with_added_tokens(make)
    plain = PlainTokenizer(tokenizer, tokenizer.get_vocab_size(), [end])
    ids = plain(text)
    assert text.encode().startswith(b"".join(plain.tokens[token] for token in ids))
    assert not set(ids) & set(plain.special_token_ids)
    before = tokenizer.encode("a", add_special_tokens=False).ids
    decoded = tokenizer.decode([*before, *ids]).removeprefix(tokenizer.decode(before))
    if make in (byte_level, prepending):
        assert decoded == text
    else:
        assert text.startswith(decoded)


def test_a_character_that_no_tokens_spell_is_refused(tokenizer_and_grammars):
    tokenizer, grammars = tokenizer_and_grammars
    constraint = Constraint(regex="é")
    has_bytes = (
        isinstance(tokenizer.decoder, decoders.ByteLevel) or "<0x41>" in tokenizer.get_vocab()
    )
    if has_bytes:
        assert write_at_random(tokenizer_and_grammars, constraint)[1] == "é"
        return
    message = r"^the regex is not valid: the model has no token that could follow$"
    for _ in range(2):  # the second time, the error comes from the cache
        with pytest.raises(PassError, match=message):
            grammars.start(constraint)


def test_a_choice_that_no_tokens_spell_is_refused_by_name():
    """Without a decoder, the tokens of words begin with the mark of a space."""
    tokenizer, end = with_added_tokens(spaced)
    tokenizer.decoder = None
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size(), [end])
    message = "the choice is not valid: the model has no token that could follow"
    with pytest.raises(PassError, match=message):
        grammars.start(Constraint(choice=["yes", "no"]))
    grammars.close()


def test_added_tokens_of_white_space_or_of_text_without_other_tokens_are_text():
    tokenizer, end = with_added_tokens(spaced)
    tokenizer.add_tokens([AddedToken("  ", normalized=False), AddedToken("é", normalized=False)])
    plain = PlainTokenizer(tokenizer, tokenizer.get_vocab_size(), [end])
    spaces, letter = tokenizer.token_to_id("  "), tokenizer.token_to_id("é")
    assert not {spaces, letter} & set(plain.special_token_ids)
    assert tokenizer.token_to_id("<think>") in plain.special_token_ids
    assert letter in plain("aé")
