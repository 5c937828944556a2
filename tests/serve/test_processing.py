"""What a server does to logits at a request's wish: constraints, penalties, biases, and tokens that
are kept out."""

from __future__ import annotations

import json
import re
from typing import Literal

import pytest
from pydantic import BaseModel

from pass_runtime import Constraint, GenerateOptions, SamplingParams

PROMPT = "The quick brown fox"
TURNS = [{"role": "user", "content": "for i in range"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    tame: bool
    legs: Literal[2, 4]


SCHEMA = Pet.model_json_schema()
IN_JSON = [
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True},
        }
    },
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    {"guided_json": SCHEMA},
]
GRAMMAR = 'start: "(" word ("," word)? ")"\nword: "a" | "bc"'
MATCHING = [
    ({"structured_outputs": {"regex": "[0-9]{3}-[ab]{2}"}}, "[0-9]{3}-[ab]{2}"),
    ({"guided_regex": "[0-9]{3}-[ab]{2}"}, "[0-9]{3}-[ab]{2}"),
    ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
    ({"guided_choice": ["red", "green"]}, "red|green"),
    ({"structured_outputs": {"grammar": GRAMMAR}}, r"\((a|bc)(,(a|bc))?\)"),
    ({"guided_grammar": GRAMMAR}, r"\((a|bc)(,(a|bc))?\)"),
]
DOING = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.0},
    {"repetition_penalty": 1.4},
    {"logit_bias": {"70": 40.0, "71": -100}},
    {"min_tokens": 20},
    {"bad_words": ["g"]},
    {"allowed_token_ids": [*range(40, 80)]},
]


@pytest.mark.parametrize("fields", IN_JSON, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("kind", ["complete", "chat"])
def test_a_schema_is_followed(server, kind, fields):
    (choice,) = getattr(server, kind)(max_tokens=200, seed=4, temperature=1, **fields).json()[
        "choices"
    ]
    assert choice["finish_reason"] == "stop"
    Pet.model_validate_json(choice["text"] if kind == "complete" else choice["message"]["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_parse_of_the_openai_package(server, stream):
    fields = {
        "model": server.model,
        "messages": TURNS,
        "max_tokens": 200,
        "temperature": 1,
        "seed": 2,
    }
    completions = server.client().chat.completions
    if stream:
        with completions.stream(**fields, response_format=Pet) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = completions.parse(**fields, response_format=Pet).choices[0].message
    assert isinstance(message.parsed, Pet)
    assert json.loads(message.content) == message.parsed.model_dump()


def test_json_object(server):
    fields = {"response_format": {"type": "json_object"}, "temperature": 1, "max_tokens": 700}
    ended = [server.chat(seed=seed, **fields).json()["choices"][0] for seed in range(4)]
    texts = [choice["message"]["content"] for choice in ended if choice["finish_reason"] == "stop"]
    assert all(text.startswith("{") for text in texts)
    assert all(isinstance(json.loads(text), dict) for text in texts)
    assert texts


@pytest.mark.parametrize(("fields", "pattern"), MATCHING, ids=lambda value: str(value)[:40])
def test_other_forms(server, fields, pattern):
    for seed in range(3):
        (choice,) = server.complete(max_tokens=40, temperature=1.5, seed=seed, **fields).json()[
            "choices"
        ]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"])


@pytest.mark.parametrize("plan", ["ar", "fused"])
@pytest.mark.parametrize("fields", DOING, ids=lambda fields: next(iter(fields)))
def test_each_field_does_what_the_session_does(server, session, fields, plan):
    of_sampling = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    sampling = {key: value for key, value in fields.items() if key in of_sampling}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {
            int(token): bias for token, bias in sampling["logit_bias"].items()
        }
    options = {key: value for key, value in fields.items() if key not in of_sampling}
    expected, plain = (
        session.generate(
            PROMPT, GenerateOptions(max_new_tokens=24, sampling=SamplingParams(**own), **more)
        ).result()
        for own, more in ((sampling, options), ({}, {}))
    )
    (choice,) = server.complete(prompt=PROMPT, max_tokens=24, plan=plan, **fields).json()["choices"]
    assert choice["text"] == expected.text
    if "min_tokens" not in fields:  # the plain text is longer
        assert choice["text"] != plain.text


def test_a_constraint_with_several_choices(server, session):
    answer = server.client().completions.create(
        model=server.model,
        prompt=PROMPT,
        n=3,
        seed=5,
        max_tokens=30,
        extra_body={"guided_regex": "[a-f]{8}"},
    )
    options = [
        GenerateOptions(
            30, SamplingParams(1.0, seed=5 + i), constraint=Constraint(regex="[a-f]{8}")
        )
        for i in range(3)
    ]
    expected = [session.generate(PROMPT, each).result().text for each in options]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 3


def test_best_of_returns_the_likeliest(server, session):
    sequences = [
        session.generate(
            PROMPT, GenerateOptions(12, SamplingParams(1.0, seed=7 + i), logprobs=0)
        ).result()
        for i in range(5)
    ]
    means = {
        each.text: sum(t.logprobs.logprob for t in each.tokens) / len(each.tokens)
        for each in sequences
    }
    answer = server.client().completions.create(
        model=server.model, prompt=PROMPT, n=2, best_of=5, seed=7, max_tokens=12, temperature=1
    )
    assert [choice.text for choice in answer.choices] == sorted(means, key=means.get, reverse=True)[
        :2
    ]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert answer.usage.completion_tokens == sum(len(each.tokens) for each in sequences)
    assert answer.usage.prompt_tokens == len(sequences[0].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(server, session, stream):
    prompts = [PROMPT, "import numpy"]
    for prompt in (prompts, [session.encode(each) for each in prompts]):
        answer = server.client().completions.create(
            model=server.model,
            prompt=prompt,
            n=2,
            echo=True,
            max_tokens=6,
            temperature=0,
            stream=stream,
        )
        found = [""] * 4
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                found[choice.index] += choice.text
        written = [session.generate(each, GenerateOptions(6)).result().text for each in prompts]
        assert found == [prompts[i // 2] + written[i // 2] for i in range(4)]
