"""Requests with constraints, penalties, biases, bad words, allowed tokens, `best_of` or `echo`."""

from __future__ import annotations

import json
import re
from typing import Literal

import pytest
from pydantic import BaseModel

from pass_runtime import GenerateOptions, SamplingParams

PROMPT = "The quick brown fox"
TURNS = [{"role": "user", "content": "for i in range"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool
    legs: Literal[2, 4]


SCHEMA = Pet.model_json_schema()
STRICT = {"name": "pet", "schema": SCHEMA, "strict": True}
SCHEMA_FIELDS = [
    {"response_format": {"type": "json_schema", "json_schema": STRICT}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"guided_json": SCHEMA},
]
"""The ways in which a request can ask for SCHEMA."""
GRAMMAR = 'start: "(" word ("," word)? ")"\nword: "a" | "bc"'
PATTERN_FIELDS = [
    ({"structured_outputs": {"regex": "[0-9]{3}-[ab]{2}"}}, "[0-9]{3}-[ab]{2}"),
    ({"guided_regex": "[0-9]{3}-[ab]{2}"}, "[0-9]{3}-[ab]{2}"),
    ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
    ({"guided_choice": ["red", "green"]}, "red|green"),
    ({"structured_outputs": {"grammar": GRAMMAR}}, r"\((a|bc)(,(a|bc))?\)"),
    ({"guided_grammar": GRAMMAR}, r"\((a|bc)(,(a|bc))?\)"),
]
"""Constraints, and a regular expression of the texts that each allows."""


@pytest.mark.parametrize("fields", SCHEMA_FIELDS, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("kind", ["complete", "chat"])
def test_a_schema_is_followed(server, kind, fields):
    answer = getattr(server, kind)(max_tokens=200, seed=4, temperature=1, **fields)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    Pet.model_validate_json(choice["text"] if kind == "complete" else choice["message"]["content"])


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
    choices = [server.chat(seed=seed, **fields).json()["choices"][0] for seed in range(4)]
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
    texts = [choice["message"]["content"] for choice in ended]
    assert texts
    assert all(text.startswith("{") for text in texts)
    assert all(isinstance(json.loads(text), dict) for text in texts)


@pytest.mark.parametrize(("fields", "pattern"), PATTERN_FIELDS, ids=lambda value: str(value)[:40])
def test_regexes_choices_and_grammars_are_followed(server, fields, pattern):
    for seed in range(3):
        answer = server.complete(max_tokens=40, temperature=1.5, seed=seed, **fields)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"])


def test_best_of_returns_the_likeliest_texts(server, session):
    sequences, mean_logprobs = [], {}
    for seed in range(7, 12):
        options = GenerateOptions(12, SamplingParams(1.0, seed=seed), logprobs=0)
        sequences.append(sequence := session.generate(PROMPT, options).result())
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
        written = [session.generate(each, GenerateOptions(6)).result().text for each in prompts]
        assert texts == [prompts[i // 2] + written[i // 2] for i in range(4)]
