from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kinds import BYTES, KINDS, TOKENIZERS, byte_fallback, byte_level, whole
from tokenizers import decoders

from pass_runtime.errors import PassError
from pass_runtime.text.detokenizer import Detokenizer, TextStream, Vocabulary

VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def ids(name: str) -> st.SearchStrategy[list[int]]:
    """Draw any ids, some beyond the vocabulary, and many of bytes that are parts of characters."""
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    of_bytes = [i for byte in BYTES if (i := tokenizer.token_to_id(f"<0x{byte:02X}>")) is not None]
    of_bytes = of_bytes or (BYTES if name == "byte-level" else [0])
    return st.lists(st.one_of(st.integers(0, size + 1), st.sampled_from(of_bytes)), max_size=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@settings(derandomize=True, deadline=None, max_examples=120)
@given(data=st.data())
def test_joined_pieces_are_the_decoded_text(name: str, data: st.DataObject):
    prompt, tokens = data.draw(ids(name)), data.draw(ids(name))
    detokenizer = Detokenizer(VOCABULARIES[name], prompt)
    pieces, starts = [], []
    for token in tokens:
        pieces.append(detokenizer.push(token))
        starts.append(detokenizer.token_start)
    before, text = whole(name, prompt, cut=False), whole(name, [*prompt, *tokens], cut=True)
    if not text.startswith(before):  # the text completes a character of the prompt, or is empty
        before = whole(name, prompt, cut=True)
    assert "".join(pieces) == text[len(before) :]
    for token, start in zip(tokens, starts, strict=True):
        own = VOCABULARIES[name].bytes(token)
        if own and "\ufffd" not in own.decode(errors="replace"):
            # At 0 a leading space may have been stripped.
            assert "".join(pieces).startswith(own.decode(), start) or start == 0


@pytest.mark.parametrize("name", KINDS)
@settings(derandomize=True, deadline=None, max_examples=50)
@given(data=st.data())
def test_nothing_is_held_back_but_the_beginning_of_a_character(name: str, data: st.DataObject):
    tokens = data.draw(ids(name))
    stream, text = TextStream(TOKENIZERS[name], []), ""
    for i, token in enumerate(tokens, 1):
        text += stream.read(token)[0]
        assert text == whole(name, tokens[:i], cut=True)
    assert stream.flush() == ""


@pytest.mark.parametrize("prompt", ["\u3042\u3044", "\u3042\u3044\u3046"])
def test_a_space_after_bytes_of_the_prompt_is_kept(prompt: str):
    """Also if the prompt ends within a character, or its last eight tokens begin in one."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode(prompt).ids
    assert TextStream(tokenizer, ids).read(tokenizer.token_to_id("\u2581a")) == (" a", None)
    assert TextStream(tokenizer, ids[:-1]).read(tokenizer.token_to_id("\u2581a")) == (" a", None)
    assert TextStream(tokenizer, ids[:-1]).read(ids[-1]) == (prompt[-1], None)


def test_a_replacement_character_at_the_end_is_text():
    for tokenizer in (byte_level(), byte_fallback()):
        stream = TextStream(tokenizer, tokenizer.encode("x").ids)
        ids = tokenizer.encode("a\ufffd").ids
        assert "".join(stream.read(token)[0] for token in ids) == "a\ufffd"


@pytest.mark.parametrize(
    "decoder", [decoders.BPEDecoder(), decoders.CTC(), decoders.Strip(" ", 0, 1)], ids=repr
)
def test_a_decoder_whose_tokens_depend_on_each_other_is_refused(decoder: object):
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    message = r"the tokenizer's decoder \((BPEDecoder|CTC|Strip)\) is not supported"
    with pytest.raises(PassError, match=message):
        Vocabulary(tokenizer)
