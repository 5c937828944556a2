from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reciting import BOS, EOS, recite, reciting_session
from tokenizers import Tokenizer

from pass_runtime.generation import Generation
from pass_runtime.options import GenerateOptions

PLANS = [("ar", 0), ("two-pass", 1), ("two-pass", 6)]
CHARACTERS = st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\ufffd")
PRINTABLE = st.text(CHARACTERS, max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tiny_bundle) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_bundle / "tokenizer.json"))


def say(
    bundle, ids: list[int], prompt=(BOS,), plan: str = "two-pass", lookahead: int = 6, **options
) -> Generation:
    session = reciting_session(bundle, recite(ids, len(prompt)))
    options = {"max_new_tokens": 500, "plan": plan, "lookahead": lookahead} | options
    return session.generate(list(prompt), GenerateOptions(**options))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(text=PRINTABLE, before=PRINTABLE, plan=st.sampled_from(PLANS))
def test_after_any_prompt_only_the_answer_is_shown(tiny_bundle, tokenizer, text, before, plan):
    prompt = [BOS, *tokenizer.encode(before).ids]
    ids = tokenizer.encode(text).ids
    generation = say(tiny_bundle, ids, prompt, *plan)
    pieces = list(generation)
    assert "".join(piece.text for piece in pieces) == generation.text == text
    assert not any("\ufffd" in piece.text for piece in pieces)
    assert [token for piece in pieces for token in piece.token_ids] == [*ids, EOS]


def test_an_answer_to_a_prompt_that_ends_within_a_character(tiny_bundle, tokenizer):
    """The prompt, given as token ids, lacks the last byte, with which the answer begins."""
    ids = tokenizer.encode("abc😀").ids
    assert tokenizer.decode(ids[:-1]).endswith("\ufffd")
    generation = say(tiny_bundle, [ids[-1], *tokenizer.encode(" ok").ids], ids[:-1]).result()
    assert "abc" not in generation.text
    assert generation.text.endswith(" ok")


def test_an_answer_to_a_prompt_that_ends_in_a_replacement_character(tiny_bundle, tokenizer):
    prompt = tokenizer.encode("abc\ufffd").ids
    assert say(tiny_bundle, tokenizer.encode("ok").ids, prompt).result().text == "ok"


@pytest.mark.parametrize("byte_count", [1, 2, 3])
def test_the_bytes_of_an_incomplete_last_character_are_left_out(tiny_bundle, tokenizer, byte_count):
    emoji = tokenizer.encode("😀").ids
    assert len(emoji) == 4
    ids = [*tokenizer.encode("ab").ids, *emoji[:byte_count]]
    generation = say(tiny_bundle, ids).result()
    assert generation.text == "ab"
    assert generation.token_ids == [*ids, EOS]
    cut = say(tiny_bundle, [*tokenizer.encode("ab").ids, *emoji], max_new_tokens=len(ids)).result()
    assert (cut.text, cut.token_ids, cut.finish_reason) == ("ab", ids, "length")


@pytest.mark.parametrize(("plan", "lookahead"), PLANS)
def test_stop_strings_before_min_tokens_are_text(tiny_bundle, tokenizer, plan, lookahead):
    ids = tokenizer.encode("x;y;;z<eos>w;;v").ids
    texts = [tokenizer.decode(ids[:i]) for i in range(len(ids) + 1)]
    ends = [i for i in range(1, len(ids) + 1) if texts[i].endswith(";;") or ids[i - 1] == EOS]
    assert len(ends) == 3
    for min_tokens in (0, 1, ends[0] - 1, ends[0], ends[1] - 1, ends[1], ends[2] - 1, ends[2]):
        generation = say(
            tiny_bundle, ids, plan=plan, lookahead=lookahead, stop=(";;", "<eos>"),
            min_tokens=min_tokens, ignore_eos=True, max_new_tokens=len(ids),
        ).result()  # fmt: skip
        end = next((end for end in ends if end > min_tokens), len(ids))
        assert generation.token_ids == ids[:end]
        assert generation.text == texts[end].removesuffix(";;")
        assert generation.finish_reason == ("stop" if end in ends else "length")


@pytest.mark.parametrize(
    ("prompt", "answer", "stop", "text", "reason"),
    [
        ("END. EN", "D. yes", "END.", "D. yes", EOS),  # prompt and answer spell it together
        ("x", "ab<eos>STOP", "STOP", "ab", EOS),
        ("x", "abSTO", "STOP", "abSTO", None),  # held back until max_new_tokens
    ],
)
def test_texts_that_no_stop_ends(tiny_bundle, tokenizer, prompt, answer, stop, text, reason):
    ids, prompt = tokenizer.encode(answer).ids, tokenizer.encode(prompt).ids
    limit = {} if reason == EOS else {"max_new_tokens": len(ids)}
    generation = say(tiny_bundle, ids, prompt, stop=(stop,), **limit)
    assert "".join(piece.text for piece in generation) == generation.text == text
    assert generation.stop_reason == reason


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    text=st.text("abé😀 ", max_size=20),
    stop=st.text("abé😀 ", min_size=1, max_size=3),
    misses=st.sets(st.integers(0, 60)),
    plan=st.sampled_from(PLANS),
)
def test_a_stop_ends_the_text_whichever_drafts_are_wrong(
    tiny_bundle, tokenizer, text, stop, misses, plan
):
    ids = tokenizer.encode(text).ids
    target = recite(ids)

    def drafter(position: int) -> int:
        return 2 if position in misses else target(position)

    session = reciting_session(tiny_bundle, target, drafter)
    options = GenerateOptions(200, plan=plan[0], lookahead=plan[1], stop=(stop,))
    generation = session.generate([BOS], options).result()
    assert generation.text == text.partition(stop)[0]
    kept = generation.token_ids  # the last one completes the stop
    assert kept == [*ids, EOS][: len(kept)]
    assert stop not in tokenizer.decode(kept[:-1])
    assert stop not in text or stop in tokenizer.decode(kept)
    assert generation.stop_reason == (stop if stop in text else EOS)
