"""Requests as clients of OpenAI's API write them: fields that are null, fields that change no text,
and errors that name the field at fault. The fields are those that the openai package knows."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import ChatCompletionMessageFunctionToolCallParam as FunctionToolCallParam
from openai.types.chat import ChatCompletionStreamOptionsParam as StreamOptionsParam
from openai.types.chat import (
    completion_create_params as chat_params,
)
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseInputTextParam,
    ResponseOutputMessageParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
    response_create_params,
)
from openai.types.responses.response_input_item_param import FunctionCallOutput
from openai.types.shared_params import FunctionDefinition, Reasoning
from running import expect_error
from starlette.testclient import TestClient
from tool_models import HERMES, QUESTION, TOOLS, with_template

from pass_runtime import LoadOptions, load
from pass_runtime.text.templates import ChatTemplate
from pass_server.app import make_app
from pass_server.responses_input import ResponsesRequest
from pass_server.schemas import ChatRequest, CompletionRequest
from pass_server.serve_options import ServeOptions

BASES: dict[type, dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "a"},
    ChatRequest: {"model": "m", "messages": QUESTION},
    ResponsesRequest: {"model": "m", "input": QUESTION},
}
PATHS = {
    CompletionRequest: "/v1/completions",
    ChatRequest: "/v1/chat/completions",
    ResponsesRequest: "/v1/responses",
}
PARAMETERS = (
    completion_create_params.CompletionCreateParamsBase,
    chat_params.CompletionCreateParamsBase,
    response_create_params.ResponseCreateParamsBase,
)
NEEDED = {"model", "prompt", "messages", "input"}
"""The fields that a request needs; an endpoint has only some of them."""
FIELDS = sorted({name for each in PARAMETERS for name in get_type_hints(each)} - NEEDED)
FUNCTION = {"name": "weather"}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "a", "type": "function", "function": FUNCTION | {"arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "21", "tool_call_id": "a"}
CALL_ITEM = {"type": "function_call", "call_id": "a", "arguments": "{}"} | FUNCTION
RESULT_ITEM = {"type": "function_call_output", "call_id": "a", "output": "21"}
PART = {"type": "text", "text": "a"}
ITEM_PART = {"type": "input_text", "text": "a"}
OUTPUT = {"type": "message", "role": "assistant", "content": "a"}
REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}


def chat(*messages: Any, **more: Any) -> tuple[type, dict[str, Any]]:
    return ChatRequest, BASES[ChatRequest] | {"messages": [*QUESTION, *messages]} | more


def response(*items: Any, **more: Any) -> tuple[type, dict[str, Any]]:
    return ResponsesRequest, BASES[ResponsesRequest] | {"input": [*QUESTION, *items]} | more


def user(*parts: Any) -> tuple[type, dict[str, Any]]:
    return chat({"role": "user", "content": [*parts]})


def input_of(*parts: Any) -> tuple[type, dict[str, Any]]:
    return response({"role": "user", "content": [*parts]})


OBJECTS: list[tuple[type, dict[str, Any], Any]] = [
    (ChatCompletionSystemMessageParam, {"role": "system", "content": "a"}, chat),
    (ChatCompletionUserMessageParam, {"role": "user", "content": "a"}, chat),
    (ChatCompletionAssistantMessageParam, CALLED, chat),
    (ChatCompletionAssistantMessageParam, {"role": "assistant", "content": "a"}, chat),
    (ChatCompletionToolMessageParam, RESULT, lambda each: chat(CALLED, each)),
    (FunctionToolCallParam, CALL, lambda each: chat(CALLED | {"tool_calls": [each]})),
    (ChatCompletionContentPartTextParam, PART, user),
    (ChatCompletionFunctionToolParam, TOOL, lambda each: chat(tools=[each])),
    (FunctionDefinition, FUNCTION, lambda each: chat(tools=[TOOL | {"function": each}])),
    (StreamOptionsParam, {}, lambda each: chat(stream=True, stream_options=each)),
    (EasyInputMessageParam, {"role": "user", "content": "a"}, response),
    (ResponseOutputMessageParam, OUTPUT, response),
    (ResponseReasoningItemParam, REASONING, response),
    (ResponseFunctionToolCallParam, CALL_ITEM, response),
    (FunctionCallOutput, RESULT_ITEM, lambda each: response(CALL_ITEM, each)),
    (ResponseInputTextParam, ITEM_PART, input_of),
    (FunctionToolParam, {"type": "function"} | FUNCTION, lambda each: response(tools=[each])),
    (Reasoning, {}, lambda each: response(reasoning=each)),
    (ResponseTextConfigParam, {}, lambda each: response(text=each)),
]
"""Objects in requests: their type in the openai package, one, and a request with it."""


def read(model: type, fields: dict[str, Any]) -> Any:
    """Return the request, which must be valid and supported."""
    return model.model_validate(fields)  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)
def test_a_field_that_is_null_is_as_if_absent(model):
    """Also one that only another endpoint has, or that nobody knows yet."""
    assert {"prompt_cache_retention", "moderation", "store", "background"} < set(FIELDS)
    for name in (*FIELDS, "client_metadata", "cache_control", "new_field"):
        assert read(model, BASES[model] | {name: None}) == read(model, BASES[model]), name


@pytest.mark.parametrize(("kind", "given", "request_with"), OBJECTS)
def test_a_field_of_an_object_that_is_null_is_as_if_absent(kind, given, request_with):
    names = set(get_type_hints(kind)) - set(given)
    assert names or given
    for name in (*names, "new_field"):
        assert read(*request_with(given | {name: None})) == read(*request_with(given)), name


@pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)
def test_neutral_values_are_as_if_absent(model):
    for name, values in model.neutral.items():
        for value in values:
            assert read(model, BASES[model] | {name: value}) == read(model, BASES[model]), name


def test_what_a_request_needs_cannot_be_null():
    for model, base in BASES.items():
        for name in base:
            with pytest.raises(ValueError, match=name):
                read(model, base | {name: None})


CACHED = {"type": "ephemeral", "ttl": "1h"}
BREAKPOINT = {"mode": "explicit", "ttl": "30m"}
PREWARM = {"prompt_cache_options": {"prewarm": True}}
NEUTRAL: dict[str, Any] = {
    "user": "me",
    "safety_identifier": "b",
    "metadata": {"a": "b"},
    "client_metadata": {"x-session": "a" * 5000},
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m", "prewarm": False},
    "cache_control": CACHED,
    "service_tier": "default",
    "store": False,
}


@pytest.fixture(scope="module")
def client(random_bundle, tmp_path_factory):
    """Return a client of an app whose model takes tools."""
    bundle = with_template(random_bundle, tmp_path_factory.mktemp("fields") / "bundle", HERMES)
    with load(bundle, LoadOptions("cpu", threads=1)) as session:
        yield TestClient(make_app(session, ServeOptions(model_name="m")))


@pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)
def test_fields_that_change_no_text_are_taken(client, model):
    limit = {"max_output_tokens" if model is ResponsesRequest else "max_tokens": 4, "seed": 1}

    def text(**more: Any) -> Any:
        response = client.post(PATHS[model], json=BASES[model] | limit | more)
        assert response.status_code == 200, response.text
        (choice,) = response.json().get("choices") or response.json()["output"]
        return choice.get("text") or choice.get("message") or choice["content"]

    plain = text()
    for name, value in NEUTRAL.items():
        assert text(**{name: value}) == plain, name
    assert text(**NEUTRAL) == plain


@pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)
@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        (PREWARM, "prompt_cache_options.prewarm", "unsupported_parameter"),
        ({"prompt_cache_options": {"a": 1}}, "prompt_cache_options.a", "unknown_parameter"),
        ({"moderation": {"model": "omni"}}, "moderation", "unknown_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"prompt_cache_retention": 24}, "prompt_cache_retention", "string_type"),
        ({"cache_control": "ephemeral"}, "cache_control", "dict_type"),
    ],
    ids=str,
)
def test_values_that_would_change_something_are_refused(client, model, more, param, code):
    problem = expect_error(client.post(PATHS[model], json=BASES[model] | more), 400)
    assert (problem["param"], problem["code"]) == (param, code)


def test_the_model_never_sees_what_should_stay_cached(client, monkeypatch):
    """In texts, messages, calls and tools."""
    tool = TOOLS[0]
    cached = {"cache_control": CACHED}
    plain = {"messages": [{"role": "user", "content": [PART]}, CALLED, RESULT], "tools": [tool]}
    marked = {
        "messages": [
            {"role": "user", "content": [PART | cached | {"prompt_cache_breakpoint": BREAKPOINT}]},
            CALLED | cached,
            RESULT | {"content": [{"type": "text", "text": "21"} | cached]} | cached,
        ],
        "tools": [tool | cached | {"function": tool["function"] | cached}],
    }
    seen = []
    render = ChatTemplate.render

    def recorded(template: ChatTemplate, messages: Any, **variables: Any) -> str:
        seen.append((messages, variables))
        return render(template, messages, **variables)

    monkeypatch.setattr(ChatTemplate, "render", recorded)
    tokens = [client.post("/tokenize", json=each).json()["tokens"] for each in (plain, marked)]
    assert tokens[0] == tokens[1]
    assert len(seen) == 2 and seen[0] == seen[1] and "weather" in str(seen)
    items = [
        {"role": "user", "content": [ITEM_PART | cached | {"prompt_cache_breakpoint": BREAKPOINT}]},
        CALL_ITEM | cached,
        RESULT_ITEM | {"output": [ITEM_PART | cached]},
    ]
    function = {"type": "function"} | tool["function"] | cached
    body = {"model": "m", "input": items, "tools": [function], "max_output_tokens": 1}
    answer = client.post("/v1/responses", json=body).json()
    assert "cache_control" not in answer["tools"][0]
    plain_items = [
        {"role": "user", "content": [ITEM_PART]},
        CALL_ITEM,
        RESULT_ITEM | {"output": [ITEM_PART]},
    ]
    body |= {"input": plain_items, "tools": [{"type": "function"} | tool["function"]]}
    same = client.post("/v1/responses", json=body).json()
    assert answer["usage"]["input_tokens"] == same["usage"]["input_tokens"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
COLOURED, OTHER = PART | {"colour": "red"}, ITEM_PART | {"colour": None, "x": 1}
ANSWERED = {"role": "assistant", "content": [PART | {"annotations": []}]}
WRONG: list[tuple[tuple[type, dict[str, Any]], str, str]] = [
    (user(PART, COLOURED), "messages.1.content.1.colour", "unknown field"),
    (chat(ANSWERED), "messages.1.content.0.annotations", "unknown field"),
    (input_of(OTHER), "input.1.content.0.x", "unknown field"),
    (response(CALL_ITEM, RESULT_ITEM | {"output": [OTHER]}), "input.2.output.0.x", "unknown field"),
    (user(PART, IMAGE), "messages.1.content", "reads text only"),
    (user({"type": "text"}), "messages.1.content", "must be text, in parts such as"),
    (user({"text": "a"}), "messages.1.content.0.type", "required"),
    (user(PART, PART | {"text": 5}), "messages.1.content.1.text", "valid string"),
    (chat({"role": "user", "content": 5}), "messages.1.content", "valid string"),
    (user(PART | {"cache_control": "a"}), "messages.1.content.0.cache_control", "valid dictionary"),
    (chat(stop=["a", 5]), "stop.1", "valid string"),
    (chat(tools=TOOLS, tool_choice={"type": "function"}), "tool_choice.function", "required"),
    (chat(tools=TOOLS, tool_choice="always"), "tool_choice", "'none', 'auto' or 'required'"),
    (response(tool_choice={"type": "function"}), "tool_choice.name", "required"),
    (chat(guided_json=["a"]), "guided_json", "valid string"),
    (input_of({"text": "a"}), "input.1.content.0.type", "required"),
]


@pytest.mark.parametrize(("wrong", "param", "why"), WRONG)
def test_errors_name_the_field_at_fault(client, wrong, param, why):
    model, fields = wrong
    problem = expect_error(client.post(PATHS[model], json=fields), 400)
    assert problem["param"] == param, problem
    assert why in problem["message"]
