"""`pass_details`: the tokens of each pass and where they came from, only if a request asks for
them."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from reciting import reciting_session, right_unless
from starlette.testclient import TestClient
from tool_models import THINKING

from pass_runtime import GenerateOptions, SamplingParams
from pass_runtime.text.chat_template import ChatTemplate
from pass_server.app import make_app
from pass_server.serve_options import ServeOptions

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def session(tiny_bundle):
    """Of its look-ahead drafts some are accepted; many of its tokens are parts of characters, which
    have no text."""
    with reciting_session(
        tiny_bundle, drafter=right_unless(lambda position: position % 5 < 3)
    ) as session:
        session.chat_template = ChatTemplate(THINKING, {"bos_token": "<bos>", "eos_token": "<eos>"})
        yield session


@pytest.fixture(scope="module")
def http(session):
    return TestClient(make_app(session, ServeOptions(model_name="m")))


def body(path: str, **fields: object) -> dict:
    asked = (
        {"prompt": "a"}
        if path == ENDPOINTS[0]
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    return {"model": "m", "temperature": 0, "max_tokens": 40, "plan": "fused"} | asked | fields


def choices(http: TestClient, path: str, **fields: object) -> list[dict]:
    """Of the chunks of a stream."""
    lines = http.post(path, json=body(path, stream=True, **fields)).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]


def text_of(choice: dict) -> str:
    if "text" in choice:
        return choice["text"]
    return choice["delta"].get("content", "") + choice["delta"].get("reasoning_content", "")


def expected(session, prompt: list[int]) -> list[list[dict]]:
    """The tokens of each pass, as the session tells them."""
    options = GenerateOptions(
        sampling=SamplingParams(temperature=0.0), max_new_tokens=40, plan="fused"
    )
    pieces = session.generate(prompt, options)
    return [
        [{"id": t.id, "text": t.text, "source": t.source} for t in piece.tokens] for piece in pieces
    ]


def prompt_of(session, path: str) -> list[int]:
    return (
        session.encode("a")
        if path == ENDPOINTS[0]
        else session.encode_chat([{"role": "user", "content": "a"}])
    )


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_stream_tells_of_every_pass(session, http, path, logprobs):
    more = {"logprobs": (2 if path == ENDPOINTS[0] else True)} if logprobs else {}
    found = choices(http, path, pass_details=True, **more)
    passes = [choice for choice in found[:-1] if "pass" in choice]
    assert [choice["pass"]["tokens"] for choice in passes] == expected(
        session, prompt_of(session, path)
    )
    sources = {token["source"] for choice in passes for token in choice["pass"]["tokens"]}
    assert sources == {"model", "lookahead"}
    seconds = [choice["pass"]["seconds"] for choice in passes]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    if logprobs:
        logs = [choice["logprobs"] for choice in passes]
        assert [len(each.get("content") or each["tokens"]) for each in logs] == [
            len(choice["pass"]["tokens"]) for choice in passes
        ]
    told = "".join(token["text"] for choice in passes for token in choice["pass"]["tokens"])
    assert (
        told.split() == "".join(map(text_of, found)).split()
    )  # around thoughts, a chat leaves out spaces
    assert any(not text_of(choice) for choice in passes), (
        "a pass that wrote a part of a character is there, too"
    )
    ended = found[-1]["pass"]
    assert ended["passes"] == len(passes)
    rates = ended["acceptance_per_position"]
    assert 0 < rates[0] < 1
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_whole_answer_tells_of_every_token(session, http, path):
    (choice,) = http.post(path, json=body(path, pass_details=True)).json()["choices"]
    assert choice["pass"]["tokens"] == [*chain(*expected(session, prompt_of(session, path)))]
    assert choice["pass"]["acceptance_per_position"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_nobody_gets_them_unasked(http, path):
    """Nothing is added, and passes without text have no chunk."""
    for fields in ({}, {"pass_details": False}):
        *found, last = choices(http, path, **fields)
        assert not any("pass" in choice for choice in found)
        assert all(text_of(choice) or choice["delta"].get("role") for choice in found)
        whole = http.post(path, json=body(path, **fields)).json()["choices"][0]["pass"]
        assert {"tokens", "acceptance_per_position"}.isdisjoint(last["pass"].keys() | whole.keys())
