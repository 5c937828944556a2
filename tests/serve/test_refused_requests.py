"""Wrong and unsupported requests are refused with an error in OpenAI's shape that names a field."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from in_process import App
from running import expect_error

PATHS = {
    "completions": "/v1/completions",
    "chats": "/v1/chat/completions",
    "responses": "/v1/responses",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]
USER = {"role": "user", "content": "a"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
JSON_OBJECT = {"type": "json_object"}
OBFUSCATED = {"stream": True, "stream_options": {"include_obfuscation": True}}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
ENCRYPTED = {"type": "reasoning", "encrypted_content": "a"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "b"}
BASES = {
    "completions": {"model": "m", "prompt": "The quick"},
    "chats": {"model": "m", "messages": [USER]},
    "responses": {"model": "m", "input": "a"},
    "tokenize": {},
    "detokenize": {},
}
UNSUPPORTED, UNKNOWN = "unsupported_parameter", "unknown_parameter"
TOO_LONG = "context_length_exceeded"
WRONG = {
    "completions chats": [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
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
        ({"logit_bias": {str(token): 1 for token in range(10_000)}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, None),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"bad_words": [""]}, "bad_words.0"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [100000]}, None),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": JSON_OBJECT, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": JSON_OBJECT, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace": " "}}, "structured_outputs.whitespace"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"type": "animal"}}, "guided_json"),
        ({"colour": "red"}, "colour", UNKNOWN),
    ],
    "completions chats responses": [
        ({"temperature": 2.5}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"prompt_cache_retention": 24}, "prompt_cache_retention", "string_type"),
        ({"cache_control": "ephemeral"}, "cache_control", "dict_type"),
        ({"prompt_cache_options": {"a": 1}}, "prompt_cache_options.a", UNKNOWN),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", UNSUPPORTED),
        ({"moderation": {"model": "omni"}}, "moderation", UNKNOWN),
        ({"store": True}, "store", UNSUPPORTED),
    ],
    "completions": [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"suffix": "x"}, "suffix", "fill a gap"),
        *(
            ({"prompt": prompt}, "prompt")
            for prompt in ([], [[]], [-1], [100000], ["a", 5], [[1], "a"], None, {"a": 1})
        ),
        ({"prompt": "word " * 1000}, "prompt", TOO_LONG),
        ({"prompt": [5] * 767, "max_tokens": 9}, "max_tokens", TOO_LONG),
        ({"prompt": [5] * 760, "max_tokens": 100}, "max_tokens", TOO_LONG),
    ],
    "chats": [
        ({"messages": [USER, USER | {"colour": "red"}]}, "messages.1.colour"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"tools": [FUNCTION]}, "tools", "no format"),
        ({"tool_choice": "required"}, "tool_choice", "no tools to choose from"),
        ({"chat_template_kwargs": {"a": False}}, "chat_template_kwargs", "no option 'a'"),
        *(
            ({"messages": messages}, "messages")
            for messages in (
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
            )
        ),
    ],
    "responses": [
        ({"top_logprobs": 2}, "top_logprobs", UNSUPPORTED),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", UNSUPPORTED),
        ({"text": {"verbosity": "low"}}, "text.verbosity", UNSUPPORTED),
        (OBFUSCATED, "stream_options.include_obfuscation", UNSUPPORTED),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools", UNSUPPORTED),
        ({"tool_choice": "required"}, "tool_choice", UNSUPPORTED),
        ({"chat_template_kwargs": {"a": False}}, "chat_template_kwargs", UNSUPPORTED),
        ({"input": [ENCRYPTED]}, "input.0.encrypted_content", UNSUPPORTED),
        ({"input": [CALL]}, "input.0", UNSUPPORTED),
        ({"input": [OUTPUT]}, "input.0", UNSUPPORTED),
        ({"store": True}, "store", "stores no"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"type": "message", "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role"),
        ({"input": [USER, USER | {"colour": 1}]}, "input.1.colour"),
        ({"input": [USER | {"content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"input": [USER | {"content": [{"type": "input_text"}]}]}, "input.0.content"),
        ({"input": "word " * 1000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100000}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "animal"}}}},
            "text.format",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": JSON_OBJECT}, "ignore_eos": True}, "ignore_eos"),
    ],
    "tokenize": [
        ({}, "prompt"),
        ({"prompt": "a", "messages": TURNS}, "prompt"),
        ({"prompt": "a", "tools": [FUNCTION]}, "tools"),
        ({"prompt": 5}, "prompt"),
        ({"messages": TURNS, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": TURNS, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "unknown": 1}, "unknown"),
    ],
    "detokenize": [({"tokens": [10**9]}, "tokens"), ({}, "tokens")],
}
"""By endpoints: fields, the field that the error names (None if a session finds the error), and a
word of the error."""
NOT_JSON = {
    "completions": [
        {"prompt": "\ud800"},
        {"stop": "\udfff"},
        {"guided_choice": ["\ud800"]},
        {"guided_json": {"properties": {"\ud800": {}}}},
    ],
    "responses": [
        {"metadata": {"a": "\ud800"}},
        {"tools": [{"type": "function", "name": "f", "description": "\udfff"}]},
        {"tools": [{"type": "function", "name": "f", "parameters": {"a": float("inf")}}]},
    ],
}
"""Fields with lone surrogates, which have no UTF-8, or without a number of JSON."""


@pytest.fixture
def app(session):
    return App(session)


CASES = [
    (name, *case) for names, cases in WRONG.items() for name in names.split() for case in cases
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{str(case[1])[:40]}")
def test_what_is_wrong_is_refused_by_name(app, case):
    name, fields, param, *words = case
    problem = expect_error(app.post(PATHS[name], BASES[name] | fields), 400)
    if param in ("prompt", "messages"):
        assert problem["param"].startswith(param)
    else:
        assert problem["param"] == param
    assert problem["type"] == "invalid_request_error"
    assert all(word in f"{problem['code']} {problem['message']}" for word in words), problem
    if name == "responses":
        names_of_chats = {"messages", "max_completion_tokens", "response_format"}
        assert not set(problem["message"].split()) & names_of_chats


@pytest.mark.parametrize("name", BASES)
def test_another_model_is_not_found(app, name):
    prompt = {"prompt": "a"} if name == "tokenize" else {"tokens": [5]} if "de" in name else {}
    problem = expect_error(app.post(PATHS[name], BASES[name] | prompt | {"model": "other"}), 404)
    assert (problem["param"], problem["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("name", "fields"),
    [(name, fields) for name in NOT_JSON for fields in NOT_JSON[name]],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_text_without_utf8_and_infinite_numbers_are_no_json(app, name, fields):
    body = json.dumps(BASES[name] | fields)
    assert expect_error(app.post_body(PATHS[name], body), 400)["code"] == "invalid_json"


def test_a_prompt_without_max_tokens_may_fill_the_context(app):
    assert app.complete(prompt=[5] * 760).status_code == 200


BODIES = [b"", b"{", b"[]", b"5", b'"a"', b"\xff\xfe", b'{"\\ud800": 1}', b"[" * 100000]
BODIES.append(b'{"a":' + b"1" * 10000 + b"}")


def test_bodies_that_are_no_requests_are_refused(app):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        for body in BODIES:
            expect_error(app.post_body(path, body), 400)


def test_unknown_paths_are_404_and_wrong_methods_405(app):
    expect_error(app.http.get("/v1/nothing"), 404)
    for path in ("completions", "responses"):
        expect_error(app.http.get(f"/v1/{path}"), 405)


def test_a_page_of_another_site_cannot_send_requests(server):
    """A body without `Content-Type: application/json` is refused, because browsers send text/plain
    to other sites without asking them first (by a CORS preflight)."""
    expect_error(
        httpx.post(f"{server.url}/v1/completions", content=b'{"model": "a", "prompt": "b"}'), 400
    )


def test_responses_are_not_stored(app):
    responses = app.client().responses
    answer = responses.create(model="m", input="a", max_output_tokens=1)
    for call in (
        responses.retrieve,
        responses.delete,
        responses.cancel,
        responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            list(call(answer.id) or ())
        assert caught.value.code == "response_not_stored"
        assert "stores no responses" in caught.value.message
