"""Function calls that a model is forced to write, in chats and in responses, in the call formats of
three model families."""

from __future__ import annotations

import json

import openai
import pytest
from in_process import App
from openai import pydantic_function_tool
from pydantic import BaseModel
from running import expect_error
from tool_models import CLOCK, FUNCTIONS, QUESTION, TEMPLATES, TOOLS, WEATHER, with_template

from pass_runtime import load
from pass_server.tool_calls import FORMATS

END = {"1": 12}
"""A bias with which the random model ends its text as soon as a constraint allows it."""


class Clock(BaseModel):
    utc: bool


@pytest.fixture(scope="module", params=FORMATS)
def tool_app(request, random_bundle, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    bundle = with_template(random_bundle, directory / "bundle", TEMPLATES[request.param])
    with load(bundle, threads=1, max_batch_size=4) as session:
        yield App(session)


def fields(server, **more):
    """Return the fields of a chat in which the model must call a function."""
    body = {"model": server.model, "messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}
    return body | {"max_tokens": 400, "temperature": 1.0, "logit_bias": END} | more


def response_fields(**more):
    body = {"model": "m", "input": QUESTION, "tools": FUNCTIONS, "tool_choice": "required"}
    body |= {"max_output_tokens": 400, "temperature": 1.0}
    return body | {"extra_body": {"seed": 3, "logit_bias": END}} | more


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
def test_required_calls_have_the_arguments_of_their_schemas(tool_app, seed):
    (choice,) = create(tool_app, seed=seed).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        check_call(call)
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)


@pytest.mark.parametrize("named", ["weather", "clock"])
def test_a_named_function_is_called_once(tool_app, named):
    choice = {"type": "function", "function": {"name": named}}
    for each in create(tool_app, tool_choice=choice, n=3, seed=1).choices:
        (call,) = each.message.tool_calls
        assert call.function.name == named
        check_call(call)


def test_without_parallel_calls_a_turn_has_one_call(tool_app):
    options = {"parallel_tool_calls": False, "logit_bias": {"1": -100}, "seed": 2}
    (choice,) = create(tool_app, **options).choices
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"


def test_the_openai_package_parses_the_arguments(tool_app):
    tool, client = pydantic_function_tool(Clock, name="clock"), tool_app.client()
    body = fields(tool_app, tools=[tool], seed=5)
    (choice,) = client.chat.completions.parse(**body).choices
    functions = [call.function for call in choice.message.tool_calls]
    assert all(isinstance(function.parsed_arguments, Clock) for function in functions)
    with client.chat.completions.stream(**body) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.arguments for event in done] == [function.arguments for function in functions]
    body = response_fields(tools=[{"type": "function"} | tool["function"]])
    (call, *_) = client.responses.parse(**body).output
    assert call.parsed_arguments in ({"utc": True}, {"utc": False})
    with client.responses.stream(**body) as stream:
        final = stream.get_final_response()
    assert final.output[0].parsed_arguments == call.parsed_arguments


def test_required_calls_are_counted_as_constrained_requests(tool_app):
    def count_after(**more):
        create(tool_app, max_tokens=2, **more)
        return tool_app.metric("pass:constrained_requests_total", form="tools")

    before = count_after(tool_choice="auto")
    assert count_after() == before + 1
    assert count_after(tool_choice="auto") == before + 1


def test_tools_are_in_the_prompt_unless_tool_choice_is_none(tool_app):
    auto, none, without = (
        create(tool_app, max_tokens=1, **more).usage.prompt_tokens
        for more in (
            {"tool_choice": "auto"},
            {"tool_choice": "none"},
            {"tools": None, "tool_choice": None},
        )
    )
    assert none == without < auto


def test_with_a_response_format_and_tools_a_turn_is_one_of_both(tool_app):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["no", "yes"]}}}
    options = {"tool_choice": "auto", "response_format": form, "parallel_tool_calls": False}
    for seed in range(6):
        (choice,) = create(tool_app, **options, seed=seed).choices
        if choice.message.tool_calls:
            check_call(choice.message.tool_calls[0])
        else:
            assert json.loads(choice.message.content) in ("no", "yes")
            assert choice.finish_reason == "stop"


def test_wrong_tools_are_refused_by_name(tool_app):
    def refused(**more):
        with pytest.raises(openai.BadRequestError) as caught:
            create(tool_app, **more)
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


def test_required_calls_are_items_of_the_output(tool_app):
    answer = tool_app.client().responses.create(**response_fields())
    assert answer.status == "completed"
    assert answer.output_text == ""
    assert answer.tool_choice == "required"
    assert [tool.name for tool in answer.tools] == ["weather", "clock"]
    assert answer.output
    for call in answer.output:
        assert (call.type, call.status) == ("function_call", "completed")
        arguments = {"city", "days"} if call.name == "weather" else {"utc"}
        assert set(json.loads(call.arguments)) == arguments
    ids = {value for call in answer.output for value in (call.id, call.call_id)}
    assert len(ids) == 2 * len(answer.output)


def test_a_response_calls_a_named_function_once(tool_app):
    named = response_fields(tool_choice={"type": "function", "name": "clock"})
    answer = tool_app.client().responses.create(**named)
    assert [call.name for call in answer.output] == ["clock"]
    assert answer.tool_choice.name == "clock"


def test_a_call_and_its_result_have_the_prompt_of_a_chat(tool_app):
    responses = tool_app.client().responses
    first = responses.create(**response_fields(parallel_tool_calls=False))
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    second = responses.create(
        **response_fields(input=[*QUESTION, call, output], tool_choice="auto")
    )
    function = {"name": call.name, "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    messages = [*QUESTION, {"role": "assistant", "tool_calls": calls}]
    messages.append({"role": "tool", "tool_call_id": call.call_id, "content": "21 degrees"})
    chat = tool_app.chat(messages=messages, tools=TOOLS, max_tokens=1).json()
    assert second.usage.input_tokens == chat["usage"]["prompt_tokens"]


CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"}


def test_wrong_items_and_tools_are_refused_by_name(tool_app):
    def refused(**more):
        with pytest.raises(openai.BadRequestError) as caught:
            tool_app.client().responses.create(**response_fields(**more))
        message = caught.value.body["message"]
        assert "messages." not in message and "tool_call_id" not in message
        return caught.value.param

    assert refused(input=[*QUESTION, CALL, RESULT | {"call_id": "call_2"}]) == "input.2.call_id"
    assert refused(input=[*QUESTION, CALL | {"name": "a b"}]) == "input.1.name"
    assert refused(instructions="a", input=[RESULT]) == "input.0.call_id"
    file = RESULT | {"output": [{"type": "input_file"}]}
    assert refused(input=[*QUESTION, CALL, file]) == "input.2.output"
    assert refused(tools=[CLOCK]) == "tools.0.name"
    assert refused(tool_choice={"type": "function", "name": "other"}) == "tool_choice"


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
def test_a_conversation_goes_on_whatever_the_arguments_of_a_call(tool_app, arguments):
    """The prompt has the arguments as the client sent them."""
    messages = conversation(arguments)
    tokenized = tool_app.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert tokenized.status_code == 200, tokenized.text
    text = tool_app.post("/detokenize", {"tokens": tokenized.json()["tokens"]}).json()
    assert arguments in text["prompt"]
    answer = tool_app.chat(messages=messages, tools=TOOLS, max_tokens=1)
    if answer.status_code != 200:  # deep arguments are long
        assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text


def test_a_result_may_name_its_function(tool_app):
    def ask(**of_result):
        messages = conversation("{}", **of_result)
        return tool_app.chat(messages=messages, tools=TOOLS, max_tokens=1)

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


def test_arguments_may_spell_the_names_of_tokens(tool_app):
    options = {"seed": 1, "tools": [one_tool(SPELLING_SCHEMA)], "parallel_tool_calls": False}
    (choice,) = create(tool_app, **options).choices
    assert choice.finish_reason == "tool_calls"
    arguments = json.loads(choice.message.tool_calls[0].function.arguments)
    assert arguments == {SPECIAL_TOKEN: f"a{SPECIAL_TOKEN}", "</tool_call>": "<think>"}
