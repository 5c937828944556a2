"""Requests with constraints, penalties, biases, bad words, allowed tokens, `best_of` or `echo`."""

from __future__ import annotations

import json
import re
from typing import Literal

import pytest
from metered import written
from pydantic import BaseModel
from running import expect_error

PROMPT = "The quick brown fox"
TURNS = [{"role": "user", "content": "for i in range"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool
    legs: Literal[2, 4]


SCHEMA = Pet.model_json_schema()
STRICT = {"name": "pet", "schema": SCHEMA, "strict": True}
JSON, NUMBER, WORD = r'\{"kind".*\}', "[0-9]{3}-[ab]{2}", "red|green"
GRAMMAR, LISTED = 'start: "(" word ("," word)? ")"\nword: "a" | "bc"', r"\((a|bc)(,(a|bc))?\)"
FORMS = [
    ("json_schema", {"response_format": {"type": "json_schema", "json_schema": STRICT}}, JSON),
    ("json_schema", {"structured_outputs": {"json": SCHEMA}}, JSON),
    ("json_schema", {"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
    ("json_schema", {"guided_json": SCHEMA}, JSON),
    ("regex", {"structured_outputs": {"regex": NUMBER}}, NUMBER),
    ("regex", {"guided_regex": NUMBER}, NUMBER),
    ("choice", {"structured_outputs": {"choice": ["red", "green"]}}, WORD),
    ("choice", {"guided_choice": ["red", "green"]}, WORD),
    ("grammar", {"structured_outputs": {"grammar": GRAMMAR}}, LISTED),
    ("grammar", {"guided_grammar": GRAMMAR}, LISTED),
]
"""The ways to ask for a constraint, with its form, and a regular expression of its texts."""


@pytest.mark.parametrize(("form", "fields", "pattern"), FORMS)
@pytest.mark.parametrize("kind", ["complete", "chat"])
def test_a_constraint_is_followed_and_counted(server, kind, form, fields, pattern):
    def count() -> float:
        return server.metric("pass:constrained_requests_total", form=form, model_name=server.model)

    before = count()
    answer = getattr(server, kind)(max_tokens=200, seed=4, temperature=1, n=2, **fields)
    for choice in answer.json()["choices"]:
        text = choice["text"] if kind == "complete" else choice["message"]["content"]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, text, re.DOTALL)
        if pattern is JSON:
            Pet.model_validate_json(text)
    assert count() == before + 1
    assert server.complete(**fields, ignore_eos=True).status_code == 400
    assert server.complete(max_tokens=1, response_format={"type": "text"}).status_code == 200
    assert count() == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_package_parses_answers_with_a_schema(server, stream):
    fields = {"model": server.model, "messages": TURNS, "temperature": 1, "seed": 2}
    fields["max_tokens"] = 200
    completions = server.client().chat.completions
    if stream:
        with completions.stream(**fields, response_format=Pet) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = completions.parse(**fields, response_format=Pet).choices[0].message
    assert isinstance(message.parsed, Pet)
    assert json.loads(message.content) == message.parsed.model_dump()


def test_json_object_makes_the_model_write_objects(server):
    fields = {"response_format": {"type": "json_object"}, "temperature": 1, "max_tokens": 700}
    counted = server.metric("pass:constrained_requests_total", form="json_object")
    choices = [server.chat(seed=seed, **fields).json()["choices"][0] for seed in range(4)]
    assert server.metric("pass:constrained_requests_total", form="json_object") == counted + 4
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
    texts = [choice["message"]["content"] for choice in ended]
    assert texts
    assert all(text.startswith("{") for text in texts)
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_best_of_returns_the_likeliest_texts(server, session):
    sequences, mean_logprobs = [], {}
    for seed in range(7, 12):
        sequence = written(session, PROMPT, max_tokens=12, temperature=1.0, seed=seed, logprobs=0)
        sequences.append(sequence)
        logprobs = [token.logprobs.logprob for token in sequence.tokens]
        mean_logprobs[sequence.text] = sum(logprobs) / len(logprobs)
    body = {"model": server.model, "prompt": PROMPT, "max_tokens": 12, "temperature": 1}
    answer = server.client().completions.create(**body, n=2, best_of=5, seed=7)
    likeliest = sorted(mean_logprobs, key=mean_logprobs.get, reverse=True)[:2]
    assert [choice.text for choice in answer.choices] == likeliest
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage.completion_tokens == sum(len(each.tokens) for each in sequences)
    assert answer.usage.prompt_tokens == len(sequences[0].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(server, session, stream):
    prompts = [PROMPT, "import numpy"]
    for prompt in (prompts, [session.encode(each) for each in prompts]):
        body = {"model": server.model, "prompt": prompt, "max_tokens": 6, "temperature": 0}
        answer = server.client().completions.create(**body, n=2, echo=True, stream=stream)
        texts = [""] * 4
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        ends = [written(session, each, max_tokens=6).text for each in prompts]
        assert texts == [prompts[i // 2] + ends[i // 2] for i in range(4)]


@pytest.mark.slow
def test_a_grammar_that_is_too_ambiguous_ends_the_text_with_an_error(server):
    grammar = 'start: a\na: a a a | a a | "x" | "xx" | "xxx"'
    body = {"guided_grammar": grammar, "max_tokens": 400, "min_tokens": 400}
    assert expect_error(server.complete(**body), 400)["code"] == "constraint_too_complex"
    events = server.complete(**body, stream=True).text
    assert "constraint_too_complex" in events
    assert events.endswith("data: [DONE]\n\n")


def test_a_constraint_may_allow_text_that_spells_a_special_token(server, session):
    added = session.tokenizer.get_added_tokens_decoder().values()
    special = next(token for token in added if token.special).content
    for fields in ({"guided_choice": [special]}, {"guided_json": {"const": special}}):
        (choice,) = server.complete(max_tokens=60, **fields).json()["choices"]
        assert choice["text"].strip('"') == special
        assert choice["finish_reason"] == "stop"
