"""`pass_details`: a request can ask for the tokens of each pass, with the source of each token."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from in_process import App
from reciting import reciting_session, right_unless
from tool_models import THINKING

from pass_runtime import GenerateOptions, SamplingParams
from pass_runtime.text.templates import ChatTemplate

MESSAGES = [{"role": "user", "content": "a"}]
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def session(tiny_bundle):
    """A session whose model accepts some look-ahead drafts, and writes a text in which many tokens
    are parts of characters."""
    drafter = right_unless(lambda position: position % 5 < 3)
    with reciting_session(tiny_bundle, drafter=drafter) as session:
        session.chat_template = ChatTemplate(THINKING, {"bos_token": "<bos>", "eos_token": "<eos>"})
        yield session


@pytest.fixture(scope="module")
def http(session):
    return App(session).http


def body(path: str, **fields: object) -> dict:
    prompt = {"prompt": "a"} if path == ENDPOINTS[0] else {"messages": MESSAGES}
    return {"model": "m", "temperature": 0, "max_tokens": 40, "plan": "fused"} | prompt | fields


def choices(http, path: str, **fields: object) -> list[dict]:
    lines = http.post(path, json=body(path, stream=True, **fields)).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]


def text_of(choice: dict) -> str:
    if "text" in choice:
        return choice["text"]
    return choice["delta"].get("content", "") + choice["delta"].get("reasoning_content", "")


def expected(session, prompt: list[int]) -> list[list[dict]]:
    pieces = session.generate(prompt, GenerateOptions(40, SamplingParams(0.0), plan="fused"))
    names = ("id", "text", "source")
    return [
        [{name: getattr(token, name) for name in names} for token in piece.tokens]
        for piece in pieces
    ]


def prompt_of(session, path: str) -> list[int]:
    return session.encode("a") if path == ENDPOINTS[0] else session.encode_chat(MESSAGES)


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_stream_has_the_tokens_of_every_pass(session, http, path, logprobs):
    fields = {"logprobs": (2 if path == ENDPOINTS[0] else True)} if logprobs else {}
    chunks = choices(http, path, pass_details=True, **fields)
    passes = [choice for choice in chunks[:-1] if "pass" in choice]
    tokens = [choice["pass"]["tokens"] for choice in passes]
    assert tokens == expected(session, prompt_of(session, path))
    assert {token["source"] for token in chain(*tokens)} == {"model", "lookahead"}
    seconds = [choice["pass"]["seconds"] for choice in passes]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    if logprobs:
        entries = [choice["logprobs"] for choice in passes]
        counts = [len(entry.get("content") or entry["tokens"]) for entry in entries]
        assert counts == [*map(len, tokens)]
    text = "".join(token["text"] for token in chain(*tokens))
    # The text of a chat is without the white space around thoughts.
    assert text.split() == "".join(map(text_of, chunks)).split()
    assert any(not text_of(choice) for choice in passes), "a pass without text has a chunk, too"
    statistics = chunks[-1]["pass"]
    assert statistics["passes"] == len(passes)
    rates = statistics["acceptance_per_position"]
    assert 0 < rates[0] < 1
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_whole_answer_has_every_token(session, http, path):
    (choice,) = http.post(path, json=body(path, pass_details=True)).json()["choices"]
    assert choice["pass"]["tokens"] == [*chain(*expected(session, prompt_of(session, path)))]
    assert choice["pass"]["acceptance_per_position"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_without_pass_details_there_are_no_tokens(http, path):
    for fields in ({}, {"pass_details": False}):
        *chunks, last = choices(http, path, **fields)
        assert not any("pass" in choice for choice in chunks)
        assert all(text_of(choice) or choice["delta"].get("role") for choice in chunks)
        whole = http.post(path, json=body(path, **fields)).json()["choices"][0]["pass"]
        assert {"tokens", "acceptance_per_position"}.isdisjoint(last["pass"].keys() | whole.keys())
