"""`echo` with `logprobs` in /v1/completions: the log-probabilities of the prompt's own tokens, as
lm-evaluation-harness asks for them."""

from __future__ import annotations

import pytest
from in_process import App
from running import expect_error
from tokenizers.processors import TemplateProcessing

from pass_runtime import GenerateOptions, load

TEXTS = ["The quick brown fox jumps over the lazy dog", "import numpy as np\nÜber €5", "T"]
NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def choices_of(server, *, stream: bool = False, **fields: object) -> list:
    body = {"model": server.model, "temperature": 0, "max_tokens": 3, "echo": True, "logprobs": 2}
    answer = server.client().completions.create(**body | fields, stream=stream)
    if not stream:
        return answer.choices
    joined = {}
    for chunk in answer:
        for choice in chunk.choices:
            whole = joined.setdefault(choice.index, choice)
            if whole is not choice:
                whole.text += choice.text
                whole.finish_reason = choice.finish_reason
                for name in NAMES if choice.logprobs else ():
                    getattr(whole.logprobs, name).extend(getattr(choice.logprobs, name))
    return [joined[index] for index in sorted(joined)]


def check(session, choice, prompt: str | list[int], count: int):
    options = GenerateOptions(count, prompt_logprobs=2, logprobs=2)
    expected = session.generate(prompt, options).result()
    lists = choice.logprobs
    logprobs = [*expected.prompt_logprobs[1:], *(token.logprobs for token in expected.tokens)]
    assert lists.token_logprobs[0] is lists.top_logprobs[0] is None
    values = [each.logprob for each in logprobs]
    assert lists.token_logprobs[1:] == pytest.approx(values, abs=1e-3)
    likeliest = [each.top[0][1] for each in logprobs]
    tops = lists.top_logprobs[1:]
    assert [max(each.values()) for each in tops] == pytest.approx(likeliest, abs=1e-3)
    assert all(len(each) <= 2 for each in tops)
    assert {len(getattr(lists, name)) for name in NAMES} == {1 + len(values)}
    text = prompt if isinstance(prompt, str) else session.decode(prompt, skip_special_tokens=True)
    assert choice.text == text + expected.text
    for token, offset in zip(lists.tokens, lists.text_offset, strict=True):
        assert token.startswith(("bytes:", "<eos>")) or choice.text.startswith(token, offset)
    assert choice.finish_reason == expected.finish_reason


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("count", [3, 0])
def test_prompts_as_text_and_as_token_ids(server, session, count, stream):
    for prompts in (TEXTS, [session.encode(each) for each in TEXTS]):
        choices = choices_of(server, prompt=prompts, max_tokens=count, stream=stream)
        for choice, prompt in zip(choices, prompts, strict=True):
            check(session, choice, prompt, count)


def test_no_tokens_without_logprobs(server):
    (choice,) = choices_of(server, prompt=TEXTS[0], max_tokens=0, logprobs=None)
    assert (choice.text, choice.logprobs) == (TEXTS[0], None)
    answer = server.complete(prompt=TEXTS[0], max_tokens=0, echo=True).json()
    assert answer["usage"]["completion_tokens"] == 0
    problem = expect_error(server.complete(max_tokens=0), 400)
    assert problem["param"] == "max_tokens" and "set echo" in problem["message"]


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 3, "stream": True}, {"n": 2, "best_of": 4}])
def test_all_choices_of_a_prompt_have_them(server, session, fields):
    sampled = {"prompt": TEXTS[:2], "temperature": 1, "seed": 5, "max_tokens": 6, **fields}
    choices = choices_of(server, **sampled)
    without = choices_of(server, **sampled, echo=False)
    assert len(choices) == 2 * fields["n"]
    for i, (choice, other) in enumerate(zip(choices, without, strict=True)):
        prompt = TEXTS[i // fields["n"]]
        assert choice.text == prompt + other.text
        count = len(session.encode(prompt))
        assert choice.logprobs.tokens[count:] == other.logprobs.tokens
        values = pytest.approx(other.logprobs.token_logprobs, abs=1e-4)
        assert choice.logprobs.token_logprobs[count:] == values
        lengths = [len(prompt) + offset for offset in other.logprobs.text_offset]
        assert choice.logprobs.text_offset[count:] == lengths
        assert choice.logprobs.token_logprobs[1:count] == pytest.approx(
            choices[i - i % fields["n"]].logprobs.token_logprobs[1:count], abs=1e-3
        )


def test_offsets_where_the_prompt_has_special_tokens(random_bundle):
    """The text repeats those that it spells, and not those that the tokenizer adds."""
    with load(random_bundle, "cpu", threads=1) as session:
        session.tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
        app = App(session)
        for prompt, text, tokens, offsets in (
            ("ä<bos>x", "ä<bos>x", ["<bos>", "<bos>", "x", "<eos>"], [0, 1, 6, 6]),
            ([0, 89, 0, 90], "xy", ["<bos>", "x", "<bos>", "y"], [0, 0, 1, 1]),
            ("", "", ["<bos>", "<eos>"], [0, 0]),
        ):
            answer = app.complete(prompt=prompt, max_tokens=0, echo=True, logprobs=0).json()
            (choice,) = answer["choices"]
            lists = choice["logprobs"]
            shown = [
                (token, offset)
                for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True)
                if not token.startswith("bytes:") and token != "ä"
            ]
            assert choice["text"] == text
            assert shown == list(zip(tokens, offsets, strict=True))
