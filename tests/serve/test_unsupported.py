"""Wrong and unsupported requests are refused with an error in OpenAI's shape that names a field."""

from __future__ import annotations

import json

import httpx
import pytest
from running import expect_error

USER = {"role": "user", "content": "a"}
WRONG = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": 2.5}, "temperature"),
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
    ({"frequency_penalty": "1"}, "frequency_penalty"),
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


UNSUPPORTED = [
    ("complete", {"suffix": "x"}, "suffix", "fill a gap"),
    ("complete", {"store": True}, "store", "store True is not supported"),
    ("chat", {"web_search_options": {}}, "web_search_options", "with this value"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "no format"),
    ("chat", {"tool_choice": "required"}, "tool_choice", "no tools to choose from"),
    ("chat", {"chat_template_kwargs": {"a": False}}, "chat_template_kwargs", "no option 'a'"),
]


@pytest.mark.parametrize(("kind", "fields", "param", "why"), UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(server, kind, fields, param, why):
    problem = expect_error(getattr(server, kind)(**fields), 400)
    assert (problem["param"], problem["code"]) == (param, "unsupported_parameter")
    assert why in problem["message"]


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
    assert expect_error(getattr(server, kind)(model="other"), 404)["param"] == "model"


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
        [USER | {"content": [{"type": "input_audio", "input_audio": {}}]}],
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}],
    ],
)
def test_wrong_messages_are_refused(server, messages):
    assert expect_error(server.chat(messages=messages), 400)["param"].startswith("messages")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
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
