"""Function calls that a model is forced to write, in the call formats of three model families."""

from __future__ import annotations

import json

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from running import Server, expect_error
from tool_models import CLOCK, QUESTION, TEMPLATES, TOOLS, WEATHER, with_template

from pass_server.tool_calls import FORMATS

END = {"1": 12}
"""A bias with which the random model ends its text as soon as a constraint allows it."""


class Clock(BaseModel):
    utc: bool


@pytest.fixture(scope="module", params=FORMATS)
def tool_server(request, random_bundle, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    bundle = with_template(random_bundle, directory / "bundle", TEMPLATES[request.param])
    with Server(bundle, directory / "log", "--max-batch-size", 4) as running:
        running.format = request.param
        yield running


def fields(server, **more):
    """Return the fields of a chat in which the model must call a function."""
    body = {"model": server.model, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
    return body | {"max_tokens": 400, "temperature": 1.0, "logit_bias": END} | more


def create(server, **more):
    return server.client().chat.completions.create(**fields(server, **more))


def check_call(call):
    """Assert that a call is one of TOOLS, with arguments of its schema."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments["city"] in ("Paris", "Rome")
        assert 1 <= arguments["days"] <= 9
        assert len(arguments) == 2
    else:
        assert call.function.name == "clock"
        assert arguments in ({"utc": True}, {"utc": False})


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_have_the_arguments_of_their_schemas(tool_server, seed):
    (choice,) = create(tool_server, seed=seed).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        check_call(call)
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)


def test_a_stream_has_the_same_calls(tool_server):
    whole = create(tool_server, seed=3).choices[0].message.tool_calls
    chunks = list(create(tool_server, seed=3, stream=True))
    calls: list[dict] = []
    pieces = 0
    for delta in (choice.delta for chunk in chunks for choice in chunk.choices):
        assert not delta.content
        for part in delta.tool_calls or ():
            if part.id is not None:
                assert part.index == len(calls)
                calls.append({"name": part.function.name, "arguments": ""})
            else:
                pieces += 1
            calls[part.index]["arguments"] += part.function.arguments
    assert calls == [call.function.model_dump() for call in whole]
    assert pieces > len(calls)  # arguments come while they are written
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("named", ["weather", "clock"])
def test_a_named_function_is_called_once(tool_server, named):
    choice = {"type": "function", "function": {"name": named}}
    for each in create(tool_server, tool_choice=choice, n=3, seed=1).choices:
        (call,) = each.message.tool_calls
        assert call.function.name == named
        check_call(call)


def test_without_parallel_calls_a_turn_has_one_call(tool_server):
    options = {"parallel_tool_calls": False, "logit_bias": {"1": -100}, "seed": 2}
    (choice,) = create(tool_server, **options).choices
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"


def test_the_openai_package_parses_the_arguments(tool_server):
    body = fields(tool_server, tools=[pydantic_function_tool(Clock, name="clock")], seed=5)
    completions = tool_server.client().chat.completions
    (choice,) = completions.parse(**body).choices
    functions = [call.function for call in choice.message.tool_calls]
    assert all(isinstance(function.parsed_arguments, Clock) for function in functions)
    with completions.stream(**body) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.arguments for event in done] == [function.arguments for function in functions]


def test_required_calls_are_counted_as_constrained_requests(tool_server):
    def count_after(**more):
        create(tool_server, max_tokens=2, **more)
        return tool_server.metric("pass:constrained_requests_total", form="tools")

    before = count_after(tool_choice="auto")
    assert count_after() == before + 1
    assert count_after(tool_choice="auto") == before + 1


def test_tools_are_in_the_prompt_unless_tool_choice_is_none(tool_server):
    auto, none, without = (
        create(tool_server, max_tokens=1, **more).usage.prompt_tokens
        for more in (
            {"tool_choice": "auto"},
            {"tool_choice": "none"},
            {"tools": None, "tool_choice": None},
        )
    )
    assert none == without < auto


def test_with_a_response_format_and_tools_a_turn_is_one_of_both(tool_server):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["no", "yes"]}}}
    options = {"tool_choice": "auto", "response_format": form, "parallel_tool_calls": False}
    for seed in range(6):
        (choice,) = create(tool_server, **options, seed=seed).choices
        if choice.message.tool_calls:
            check_call(choice.message.tool_calls[0])
        else:
            assert json.loads(choice.message.content) in ("no", "yes")
            assert choice.finish_reason == "stop"


def test_wrong_tools_are_refused_by_name(tool_server):
    def refused(**more):
        with pytest.raises(openai.BadRequestError) as caught:
            create(tool_server, **more)
        return caught.value.param

    assert refused(tools=[CLOCK, CLOCK]) == "tools"
    assert refused(tools=[]) == "tool_choice"
    assert refused(tool_choice={"type": "function", "function": {"name": "other"}}) == "tool_choice"
    assert refused(tools=[one_tool({}, name="a b")]) == "tools.0.function.name"
    assert refused(tools=[{"type": "web_search"}]) == "tools.0.type"
    other_call = conversation("{}", tool_call_id="other-one")
    assert refused(messages=other_call) == "messages.2.tool_call_id"
    assert refused(tools=[one_tool({"properties": {"a": {"type": "animal"}}})]) == "tools"
    assert refused(logit_bias=None, extra_body={"ignore_eos": True}) == "ignore_eos"


def conversation(arguments, **of_result):
    """Return messages with a call that has these arguments, and its result. Mistral's template
    wants ids of 9 characters."""
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "error"} | of_result
    return [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        result,
        *QUESTION,
    ]


BAD_ARGUMENTS = {
    "cut": '{"city": "Rom',
    "list": "[1]",
    "lone surrogate": '{"a": "\\ud800"}',
    "not a number": '{"a": NaN}',
    "deep": '{"a":' * 210 + "1" + "}" * 210,
    "a special token": '{"a": "<eos>',
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_a_conversation_goes_on_whatever_the_arguments_of_a_call(tool_server, arguments):
    """The prompt has the arguments as the client sent them."""
    messages = conversation(arguments)
    tokenized = tool_server.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert tokenized.status_code == 200, tokenized.text
    text = tool_server.post("/detokenize", {"tokens": tokenized.json()["tokens"]}).json()
    assert arguments in text["prompt"]
    answer = tool_server.chat(messages=messages, tools=TOOLS, max_tokens=1)
    if answer.status_code != 200:  # deep arguments are long
        assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text


def test_a_result_may_name_its_function(tool_server):
    def ask(**of_result):
        messages = conversation("{}", **of_result)
        return tool_server.chat(messages=messages, tools=TOOLS, max_tokens=1)

    answers = [ask(**more).json() for more in ({}, {"name": "weather"}, {"name": None})]
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1
    problem = expect_error(ask(name="clock"), 400)
    assert problem["param"] == "messages.2.name"
    assert "'abcdefghi' is of the function 'weather'" in problem["message"]


def test_a_template_without_tools_refuses_them(server):
    problem = expect_error(server.chat(tools=TOOLS), 400)
    assert problem["param"] == "tools"
    assert "chat template" in problem["message"]
    assert server.chat(tools=[WEATHER], tool_choice="none", max_tokens=2).status_code == 200


def one_tool(parameters: dict, name: str = "f", **more: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


SPECIAL_TOKEN = "<eos>"
SPELLING_SCHEMA = {
    "type": "object",
    "properties": {
        SPECIAL_TOKEN: {"const": f"a{SPECIAL_TOKEN}"},
        "</tool_call>": {"enum": ["<think>"]},
    },
    "required": [SPECIAL_TOKEN, "</tool_call>"],
    "additionalProperties": False,
}


def test_arguments_may_spell_the_names_of_tokens(tool_server):
    options = {"seed": 1, "tools": [one_tool(SPELLING_SCHEMA)], "parallel_tool_calls": False}
    (choice,) = create(tool_server, **options).choices
    assert choice.finish_reason == "tool_calls"
    arguments = json.loads(choice.message.tool_calls[0].function.arguments)
    assert arguments == {SPECIAL_TOKEN: f"a{SPECIAL_TOKEN}", "</tool_call>": "<think>"}


SURROGATE_TOOLS = [
    one_tool({"properties": {"\ud800": {}}}),
    one_tool({"properties": {"a": {"const": "\ud800"}}}),
    one_tool({}, description="\ud800"),
    one_tool({}, name="\ud800"),
]


@pytest.mark.parametrize("tool", SURROGATE_TOOLS, ids=["key", "const", "description", "name"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_lone_surrogate_in_a_tool_is_no_server_error(tool_server, tool, choice):
    """A lone surrogate, half of a character in UTF-16, has no UTF-8. It is refused in names and in
    grammars. Elsewhere, a template may write it as an escape."""
    body = json.dumps(fields(tool_server, tools=[tool], tool_choice=choice))
    answer = tool_server.post_body("/v1/chat/completions", body)
    in_grammar = choice == "required" and tool in SURROGATE_TOOLS[:2]
    allowed = (400,) if in_grammar or tool is SURROGATE_TOOLS[3] else (200, 400)
    assert answer.status_code in allowed, answer.text
