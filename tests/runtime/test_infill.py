from __future__ import annotations

import pytest
from tokenizer_kinds import byte_fallback, byte_level
from tokenizers import Tokenizer, normalizers
from tokenizers.processors import TemplateProcessing

from pass_runtime import PassError, load
from pass_runtime.text.infill import CONVENTIONS, find_infill

PREFIX, SUFFIX = "def f(a):\n    return ", "\n\nprint(f(1))\n"


def tokenizer_with(markers: tuple[str, ...], *, start: bool = False) -> Tokenizer:
    """Return a byte-level tokenizer with these special tokens. start: whether prompts begin with
    <s>, and end with </s>."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(markers))
    if start:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A </s>",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")],
        )
    return tokenizer


@pytest.mark.parametrize("markers", CONVENTIONS, ids=lambda markers: markers[0])
@pytest.mark.parametrize("start", [False, True], ids=["no start token", "start token"])
def test_each_convention_is_found_in_the_tokenizer(markers, start):
    tokenizer = tokenizer_with(markers, start=start)
    before, after, gap = markers
    written = ("<s>" if start else "") + f"{before}{PREFIX}{after}{SUFFIX}{gap}"
    infill = find_infill(tokenizer)
    ids = infill.encode(PREFIX, SUFFIX)
    assert ids == tokenizer.encode(written, add_special_tokens=False).ids
    ends = {tokenizer.token_to_id(token) for token in (*markers, "</s>")}
    assert {*infill.end_token_ids} == ends
    for prefix, suffix in (("", SUFFIX), (PREFIX, ""), (f"{before}x", "y")):
        written = ("<s>" if start else "") + f"{before}{prefix}{after}{suffix}{gap}"
        assert (
            infill.encode(prefix, suffix) == tokenizer.encode(written, add_special_tokens=False).ids
        )


def test_the_model_may_end_with_any_token_of_its_convention():
    qwen = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")
    others = ("<|repo_name|>", "<|file_sep|>", "<|endoftext|>")
    tokenizer = tokenizer_with((*qwen, *others, "<|im_start|>"))
    ends = {tokenizer.token_to_id(token) for token in (*qwen, *others, "</s>")}
    assert {*find_infill(tokenizer).end_token_ids} == ends


def test_a_space_that_a_tokenizer_puts_before_texts_is_not_put_before_the_suffix():
    """As in Meta's code for CodeLlama, where the prefix has it."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    markers = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    tokenizer.add_special_tokens(list(markers))
    infill = find_infill(tokenizer)
    pieces = [tokenizer.id_to_token(token) for token in infill.encode("a b", "x\n x")]
    line = ["x", "<0x0A>", "▁", "x"]
    assert pieces == ["▁<PRE>", "▁", "a", "▁", "b", "▁<SUF>", *line, "▁<MID>"]
    assert tokenizer.token_to_id("▁<EOT>") in infill.end_token_ids


@pytest.mark.parametrize(
    "tokens", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("<repo_name>", "<file_sep>")]
)
def test_other_tokenizers_have_no_such_prompts(tokens):
    assert find_infill(tokenizer_with(tokens)) is None


def test_a_session_of_a_model_without_the_tokens_refuses(tiny_bundle):
    with load(tiny_bundle, "cpu", threads=1) as session:
        assert session.infill_end_ids == ()
        with pytest.raises(PassError, match="has no fill-in-the-middle tokens; use plain prompts"):
            session.encode_infill("a", "b")
