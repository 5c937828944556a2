"""`echo` with `logprobs` in /v1/completions: the log-probabilities of the prompt's own tokens, as
lm-evaluation-harness asks for them."""

from __future__ import annotations

import pytest
from running import expect_error
from starlette.testclient import TestClient
from tokenizers.processors import TemplateProcessing

from pass_runtime import GenerateOptions, load
from pass_server.app import make_app
from pass_server.serve_options import ServeOptions

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


def check(session, choice, prompt: str | list[int], count: int = 3, ignore_eos: bool = False):
    options = GenerateOptions(count, prompt_logprobs=2, logprobs=2, ignore_eos=ignore_eos)
    expected = session.generate(prompt, options).result()
    lists = choice.logprobs
    values = [None, *(each.logprob for each in expected.prompt_logprobs[1:])]
    values += [token.logprobs.logprob for token in expected.tokens]
    assert lists.token_logprobs[0] is lists.top_logprobs[0] is None
    assert lists.token_logprobs[1:] == pytest.approx(values[1:], abs=1e-3)
    assert all(each and len(each) <= 2 for each in lists.top_logprobs[1:])
    assert {len(getattr(lists, name)) for name in NAMES} == {len(values)}
    text = prompt if isinstance(prompt, str) else session.decode(prompt, skip_special_tokens=True)
    assert choice.text == text + expected.text
    for token, offset in zip(lists.tokens, lists.text_offset, strict=True):
        assert token.startswith(("bytes:", "<eos>")) or choice.text.startswith(token, offset)
    assert choice.finish_reason == expected.finish_reason


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_prompts_as_text_and_as_token_ids(server, session, stream):
    for prompts in (TEXTS, [session.encode(each) for each in TEXTS]):
        choices = choices_of(server, prompt=prompts, stream=stream)
        for choice, prompt in zip(choices, prompts, strict=True):
            check(session, choice, prompt)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_no_tokens_but_those_of_the_prompt(server, session, stream):
    for choice, prompt in zip(
        choices_of(server, prompt=TEXTS, max_tokens=0, stream=stream), TEXTS, strict=True
    ):
        assert choice.text == prompt and choice.finish_reason == "length"
        assert choice.logprobs.text_offset[0] == 0
        ids = session.encode(prompt)
        scored = session.generate(ids, GenerateOptions(0, prompt_logprobs=0)).result()
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(
            [each.logprob for each in scored.prompt_logprobs[1:]], abs=1e-3
        )


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


def test_the_requests_of_the_harness(server, session):
    """What lm-evaluation-harness sends, and what it makes of the answer: the sum over the tokens of
    a continuation, and whether each of them is the likeliest one."""
    context, continuation = session.encode(TEXTS[0])[:8], session.encode(" lazy")
    likeliest = session.generate(context, GenerateOptions(3, ignore_eos=True)).result().token_ids
    for tokens, is_greedy in ((continuation, False), (likeliest, True)):
        payload = {"prompt": [[*context, *tokens]] * 2, "temperature": 0, "max_tokens": 1}
        payload |= {"logprobs": 1, "seed": 1234, "echo": True}
        choices = server.complete(**payload).json()["choices"]
        expected = session.generate(
            [*context, *tokens], GenerateOptions(0, prompt_logprobs=1)
        ).result()
        for choice in choices:
            own = choice["logprobs"]["token_logprobs"][len(context) : -1]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            total = sum(each.logprob for each in expected.prompt_logprobs[len(context) :])
            assert sum(own) == pytest.approx(total, abs=1e-3)
            assert is_greedy == all(
                value == max(top.values()) for value, top in zip(own, tops, strict=True)
            )


def test_offsets_where_the_prompt_has_special_tokens(random_bundle):
    """The text repeats those that it spells, and not those that the tokenizer adds."""
    with load(random_bundle, "cpu", threads=1) as session:
        session.tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
        )
        client = TestClient(make_app(session, ServeOptions(model_name="m")))
        body = {"model": "m", "max_tokens": 0, "echo": True, "logprobs": 0}
        for prompt, text, tokens, offsets in (
            ("ä<bos>x", "ä<bos>x", ["<bos>", "<bos>", "x", "<eos>"], [0, 1, 6, 6]),
            ([0, 89, 0, 90], "xy", ["<bos>", "x", "<bos>", "y"], [0, 0, 1, 1]),
            ("", "", ["<bos>", "<eos>"], [0, 0]),
        ):
            answer = client.post("/v1/completions", json=body | {"prompt": prompt}).json()
            (choice,) = answer["choices"]
            lists = choice["logprobs"]
            shown = [
                (token, offset)
                for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True)
                if not token.startswith("bytes:") and token != "ä"
            ]
            assert choice["text"] == text
            assert shown == list(zip(tokens, offsets, strict=True))
