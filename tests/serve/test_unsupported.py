"""Wrong and unsupported requests are refused with an error in OpenAI's shape that names a field."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_triton import Request, model_of
from running import expect_error
from starlette.testclient import TestClient

from pass_runtime import load
from pass_server.app import make_app
from pass_server.serve_options import ServeOptions

USER = {"role": "user", "content": "a"}
UNSUPPORTED = {
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "store": True,
    "service_tier": "priority",
    "truncate_prompt_tokens": 5,
}
UNSUPPORTED_OF_COMPLETIONS = UNSUPPORTED | {"suffix": "x", "add_special_tokens": False}
UNSUPPORTED_OF_CHATS = UNSUPPORTED | {
    "best_of": 2,
    "echo": True,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "web_search_options": {},
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
}
NEUTRAL_OF_BOTH = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "top_k": -1,
    "user": "me",
    "metadata": {"a": "b"},
    "prompt_cache_key": "a",
    "safety_identifier": "b",
    "store": False,
    "service_tier": "auto",
    "response_format": {"type": "text"},
}
NEUTRAL = {
    "complete": NEUTRAL_OF_BOTH | {"suffix": None, "add_special_tokens": True},
    "chat": NEUTRAL_OF_BOTH
    | {"tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    | {"add_generation_prompt": True},
}
"""For each kind of request, values that change nothing. They are accepted."""
WRONG = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": 5000}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"prompt_cache_key": 1}, "prompt_cache_key"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"max_tokens": 100000}, "max_tokens"),
    ({"speculative": False, "plan": "fused"}, "speculative"),
    ({"stop_token_ids": [100000]}, None),
    ({"plan": "fast"}, None),
    ({"lookahead": 7}, None),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"the": 1}}, "logit_bias.the"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {str(token): 1 for token in range(10_000)}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, None),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [100000]}, None),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"type": "animal"}}, "guided_json"),
]

"""Wrong fields, and the field that the error names: None if a session finds the error."""


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        *(("complete", *item) for item in UNSUPPORTED_OF_COMPLETIONS.items()),
        *(("chat", *item) for item in UNSUPPORTED_OF_CHATS.items()),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unsupported_fields_are_refused_by_name(server, kind, field, value):
    problem = expect_error(getattr(server, kind)(**{field: value}), 400)
    assert (problem["param"], problem["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize("kind", NEUTRAL)
def test_neutral_values_change_nothing(server, kind):
    without, neutral = (
        getattr(server, kind)(max_tokens=4, **fields).json()["choices"][0]
        for fields in ({}, NEUTRAL[kind])
    )
    for key in ("text", "message", "finish_reason"):
        assert without.get(key) == neutral.get(key)


@pytest.mark.parametrize("kind", ["complete", "chat"])
@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_values_are_refused(server, kind, fields, param):
    problem = expect_error(getattr(server, kind)(**fields), 400)
    assert problem["param"] == param
    assert problem["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["complete", "chat"])
def test_unknown_fields_are_named(server, kind):
    problem = expect_error(getattr(server, kind)(colour="red"), 400)
    assert (problem["param"], problem["code"]) == ("colour", "unknown_parameter")


@pytest.mark.parametrize("prompt", [[], [[]], [-1], [100000], ["a", 5], [[1], "a"], None, {"a": 1}])
def test_wrong_prompts_are_refused(server, prompt):
    assert expect_error(server.complete(prompt=prompt), 400)["param"].startswith("prompt")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "robot", "content": "a"}],
        [USER | {"tool_calls": []}],
        [{"role": "assistant"}],
        [{"role": "tool", "content": "a"}],
        [{"role": "tool", "content": "a", "tool_call_id": "x"}],
        [USER | {"name": "me"}],
        [USER | {"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [USER | {"content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}],
    ],
)
def test_wrong_messages_are_refused(server, messages):
    assert expect_error(server.chat(messages=messages), 400)["param"].startswith("messages")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"messages": [USER, USER | {"content": 5}]}, "messages.1.content"),
        ("chat", {"messages": [USER, USER | {"colour": "red"}]}, "messages.1.colour"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ("chat", {"logprobs": 3}, "logprobs"),
        ("complete", {"best_of": 2, "n": 3}, "best_of"),
        ("complete", {"best_of": 2, "stream": True}, "best_of"),
        ("complete", {"best_of": 129}, "best_of"),
    ],
)
def test_fields_that_are_wrong_at_one_endpoint_are_refused(server, kind, fields, param):
    assert expect_error(getattr(server, kind)(**fields), 400)["param"] == param


@pytest.mark.parametrize("plan", ["tree-5", "tree:2,0,1,1"])
def test_trees_that_could_change_texts_are_refused(
    rounding_bundle: Path, tmp_path: Path, plan: str
):
    """By the server, and by a model of Triton."""
    reason = f"the plan {plan} could change texts: activations are rounded to 8 bits here"
    with load(rounding_bundle, "cpu", threads=1, max_batch_size=2) as session:
        client = TestClient(make_app(session, ServeOptions(model_name="m")))
        for path, fields in (("completions", {"prompt": "A"}), ("responses", {"input": "A"})):
            answer = client.post(f"/v1/{path}", json={"model": "m", "plan": plan} | fields)
            assert reason in expect_error(answer, 400)["message"]
        fused = {"model": "m", "plan": "fused", "prompt": "A"}
        assert client.post("/v1/completions", json=fused).status_code == 200
    with model_of(rounding_bundle, tmp_path / "model") as model:
        request = Request(text_input=[b"A"], plan=np.array([plan.encode()], object))
        model.execute([request])
        request.wait_until_ended()
        assert request.error.code == "INVALID_ARG" and reason in request.error.message


def test_a_suffix_is_refused_with_a_reason(server):
    assert "fill a gap" in expect_error(server.complete(suffix="x"), 400)["message"]


def test_prompts_that_do_not_fit_the_context_are_refused(server):
    for prompt, max_tokens in (("word " * 1000, 9), ([5] * 767, 9), ([5] * 760, 100)):
        problem = expect_error(server.complete(prompt=prompt, max_tokens=max_tokens), 400)
        assert problem["code"] == "context_length_exceeded"
    assert server.complete(prompt=[5] * 760).status_code == 200  # without max_tokens it fits


BODIES = [
    *(b"", b"{", b"[]", b"5", b'"a"', b"\xff\xfe", b'{"\\ud800": 1}'),
    b"[" * 100000,
    b'{"a":' + b"1" * 10000 + b"}",
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_bodies_that_are_no_requests_are_refused(server, body):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        expect_error(server.post_body(path, body), 400)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "\ud800"}),
        ("completions", {"stop": "\udfff"}),
        ("completions", {"plan": "\ud800"}),
        ("completions", {"guided_choice": ["\ud800"]}),
        ("completions", {"guided_regex": "\ud800"}),
        ("completions", {"guided_json": {"const": "\ud800"}}),
        ("completions", {"guided_json": {"properties": {"\ud800": {}}}}),
        ("responses", {"input": "\ud800"}),
        ("responses", {"metadata": {"a": "\ud800"}}),
        ("responses", {"tools": [{"type": "function", "name": "f", "description": "\udfff"}]}),
        ("responses", {"tools": [{"type": "function", "parameters": {"const": "\udfff"}}]}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_lone_surrogates_are_refused_as_wrong_json(server, path, fields):
    body = {"model": server.model, "input" if path == "responses" else "prompt": "a"} | fields
    problem = expect_error(server.post_body(f"/v1/{path}", json.dumps(body)), 400)
    assert problem["code"] == "invalid_json"


def test_unknown_paths_are_404_and_wrong_methods_405(server):
    expect_error(httpx.get(f"{server.url}/v1/nothing"), 404)
    for path in ("completions", "responses"):
        expect_error(httpx.get(f"{server.url}/v1/{path}"), 405)


def test_a_page_of_another_site_cannot_send_requests(server):
    """A body without `Content-Type: application/json` is refused, because browsers send text/plain
    to other sites without asking them first (by a CORS preflight)."""
    expect_error(
        httpx.post(f"{server.url}/v1/completions", content=b'{"model": "a", "prompt": "b"}'), 400
    )
