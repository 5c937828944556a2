"""How tokens are shown in the log-probabilities of a completion."""

from __future__ import annotations

from types import SimpleNamespace

from tokenizer_kinds import byte_fallback, byte_level

from pass_runtime.decode.sequence import Token, TokenLogprobs
from pass_runtime.text.detokenizer import Vocabulary
from pass_server.answers import Choice, CompletionFormatter, TokenTexts


def logprobs_of(vocabulary, tokens):
    choice = Choice(0, SimpleNamespace(prompt_ids=()), 0.0)
    formatter = CompletionFormatter("m", TokenTexts(vocabulary), logprobs=True)
    return formatter._logprobs_json(choice, tokens)


def test_top_logprobs_show_the_likelier_of_two_tokens_with_one_text():
    tokenizer = byte_fallback()
    vocabulary = Vocabulary(tokenizer)
    letter, byte, other = (tokenizer.token_to_id(piece) for piece in ("a", "<0x61>", "b"))
    top = ((letter, -0.5), (other, -1.0), (byte, -3.0))  # the text of `byte` is "a", too
    tokens = [Token(other, "model", TokenLogprobs(-1.0, top))]
    shown = logprobs_of(vocabulary, tokens)
    assert shown["top_logprobs"] == [{"a": -0.5, "b": -1.0}]


def test_tokens_that_form_a_character_have_its_text_offset():
    vocabulary = Vocabulary(byte_level())
    ids = b"a\xe2\x82\xacb\xe2\x82c"  # the id of a byte's token is the byte
    tokens = [Token(id, "model", TokenLogprobs(-1.0, ())) for id in ids]
    shown = logprobs_of(vocabulary, tokens)
    euro = ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert shown["tokens"] == ["a", *euro, "b", *euro[:2], "c"]
    assert shown["text_offset"] == [0, 1, 1, 1, 2, 3, 3, 4]  # the text is "a€b\ufffdc"


def test_special_tokens_have_text_and_unknown_ids_no_bytes():
    tokenizer = byte_level()
    texts = TokenTexts(Vocabulary(tokenizer))
    assert texts.text(tokenizer.token_to_id("<s>")) == "<s>"
    assert texts.bytes(tokenizer.get_vocab_size() + 5) == b""
