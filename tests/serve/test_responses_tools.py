"""/v1/responses: calls of functions, their results and thoughts are items of the output and of the
input."""

from __future__ import annotations

import json

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from recited import HERMES, WEATHER, Reciter
from running import Server
from tool_models import CLOCK, TEMPLATES, TOOLS, with_template

ASKED = [{"role": "user", "content": "How warm is it?"}]
FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": WEATHER}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"}


class Clock(BaseModel):
    utc: bool


@pytest.fixture(scope="module")
def tool_server(random_bundle, tmp_path_factory):
    directory = tmp_path_factory.mktemp("responses")
    bundle = with_template(random_bundle, directory / "bundle", TEMPLATES["hermes"])
    with Server(bundle, directory / "log", "--max-batch-size", 4) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(random_bundle, tmp_path_factory):
    template = TEMPLATES["thinking"]
    bundle = with_template(random_bundle, tmp_path_factory.mktemp("thinking") / "bundle", template)
    reciter = Reciter(bundle, template)
    yield reciter
    reciter.session.close()


def fields(server, **more):
    own = {
        "model": server.model,
        "input": ASKED,
        "tools": FUNCTIONS,
        "max_output_tokens": 400,
        "temperature": 1.0,
    }
    return (
        own | {"tool_choice": "required", "extra_body": {"seed": 3, "logit_bias": {"1": 12}}} | more
    )


def recite(thinking, text, **more):
    """-> the answer, and the events of the same answer streamed"""
    thinking.text = text
    own = {
        "model": thinking.session.manifest.model.name,
        "input": ASKED,
        "max_output_tokens": 200,
        **more,
    }
    whole = thinking.client.responses.create(**own)
    events = list(thinking.client.responses.create(**own, stream=True))
    streamed = events[-1].response
    assert events[-1].type == f"response.{whole.status}"
    assert [each.sequence_number for each in events] == list(range(len(events)))

    def shown(item):
        return {
            name: value for name, value in item.to_dict().items() if name not in ("id", "call_id")
        }

    assert [shown(item) for item in streamed.output] == [shown(item) for item in whole.output]
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in ended] == [item.to_dict() for item in streamed.output]
    return whole, events


def test_required_calls(tool_server):
    answer = tool_server.client().responses.create(**fields(tool_server))
    assert answer.status == "completed"
    assert answer.output_text == ""
    assert (answer.tool_choice, [tool.name for tool in answer.tools]) == (
        "required",
        ["weather", "clock"],
    )
    assert answer.output
    for call in answer.output:
        assert (call.type, call.status) == ("function_call", "completed")
        assert set(json.loads(call.arguments)) == (
            {"city", "days"} if call.name == "weather" else {"utc"}
        )
    assert len(
        {call.call_id for call in answer.output} | {call.id for call in answer.output}
    ) == 2 * len(answer.output)


def test_a_named_function(tool_server):
    named = fields(tool_server, tool_choice={"type": "function", "name": "clock"})
    answer = tool_server.client().responses.create(**named)
    assert [call.name for call in answer.output] == ["clock"]
    assert answer.tool_choice.name == "clock"


def test_calls_of_a_stream(tool_server):
    whole = tool_server.client().responses.create(**fields(tool_server))
    events = list(tool_server.client().responses.create(**fields(tool_server), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for place, call in enumerate(whole.output):
        own = [event for event in events if getattr(event, "output_index", None) == place]
        added, *deltas, done, ended = own
        assert (added.type, added.item.name, added.item.arguments) == (
            "response.output_item.added",
            call.name,
            "",
        )
        assert {each.type for each in deltas} == {"response.function_call_arguments.delta"}
        assert (
            "".join(each.delta for each in deltas)
            == done.arguments
            == ended.item.arguments
            == call.arguments
        )
        assert (done.type, ended.type) == (
            "response.function_call_arguments.done",
            "response.output_item.done",
        )
        assert added.item.call_id == ended.item.call_id
        assert {each.item_id for each in [*deltas, done]} == {added.item.id}
    assert events[-1].type == "response.completed"


def test_the_helpers_of_the_openai_package(tool_server):
    function = pydantic_function_tool(Clock, name="clock")["function"]
    own = fields(tool_server, tools=[{"type": "function", **function}])
    (call, *_) = tool_server.client().responses.parse(**own).output
    assert call.parsed_arguments in ({"utc": True}, {"utc": False})
    with tool_server.client().responses.stream(**own) as stream:
        final = stream.get_final_response()
    assert final.output[0].parsed_arguments == call.parsed_arguments


def test_a_whole_conversation(tool_server):
    """The prompt of items is that of the chat with the same messages."""
    responses = tool_server.client().responses
    first = responses.create(**fields(tool_server, parallel_tool_calls=False))
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    second = responses.create(
        **fields(tool_server, input=[*ASKED, call, output], tool_choice="auto")
    )
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "21 degrees"},
    ]
    chat = tool_server.client().chat.completions.create(
        model=tool_server.model, messages=messages, tools=TOOLS, max_tokens=1
    )
    assert second.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("arguments", ["{", '{"city": "Rom', "[1]", "null", '"red"', "no JSON", ""])
def test_calls_go_back_whatever_their_arguments(tool_server, arguments):
    items = [*ASKED, CALL | {"arguments": arguments, "status": "incomplete"}, RESULT, *ASKED]
    own = fields(tool_server, input=items, tool_choice="auto", max_output_tokens=1)
    assert tool_server.client().responses.create(**own).status in ("incomplete", "completed")


def test_wrong_items(tool_server):
    def refused(**more):
        with pytest.raises(openai.BadRequestError) as caught:
            tool_server.client().responses.create(**fields(tool_server, **more))
        message = caught.value.body["message"]
        assert "messages." not in message and "tool_call_id" not in message
        return caught.value.param

    assert refused(input=[*ASKED, CALL, RESULT | {"call_id": "call_2"}]) == "input.2.call_id"
    assert refused(input=[*ASKED, CALL | {"name": "a b"}]) == "input.1.name"
    assert refused(instructions="a", input=[RESULT]) == "input.0.call_id"
    assert (
        refused(input=[*ASKED, CALL, RESULT | {"output": [{"type": "input_file"}]}])
        == "input.2.output"
    )
    assert refused(tools=[FUNCTIONS[0], FUNCTIONS[0]]) == "tools"
    assert refused(tools=[]) == "tool_choice"
    assert refused(tools=[CLOCK]) == "tools.0.name"
    assert refused(tool_choice={"type": "function", "name": "other"}) == "tool_choice"


def test_thoughts_text_and_calls_are_items(thinking):
    whole, events = recite(thinking, f"hm hm</think>\n{HERMES}", tools=FUNCTIONS)
    thoughts, message, call = whole.output
    assert (thoughts.type, thoughts.content[0].text, thoughts.summary) == ("reasoning", "hm hm", [])
    assert (message.content[0].text, whole.output_text) == ("Let me see.", "Let me see.")
    assert (call.name, call.arguments, whole.status) == ("weather", WEATHER, "completed")
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm hm"
    kinds = [event.type.removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    of_text = ["content_part.done", "output_item.done"]
    assert once == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *(
            "reasoning_text.delta",
            "reasoning_text.done",
            *of_text,
            "output_item.added",
            "content_part.added",
        ),
        *("output_text.delta", "output_text.done", *of_text, "output_item.added"),
        *(
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ),
    ]
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens


def test_thoughts_and_calls_that_are_cut_off(thinking):
    whole, _ = recite(thinking, "hm hm hm hm", max_output_tokens=4)
    (thoughts,) = whole.output
    assert (thoughts.type, thoughts.status, whole.status) == (
        "reasoning",
        "incomplete",
        "incomplete",
    )
    assert whole.usage.output_tokens_details.reasoning_tokens == 4
    size = len(thinking.session.tokenizer.encode(f"</think>{HERMES}", add_special_tokens=False).ids)
    whole, _ = recite(thinking, f"</think>{HERMES}", max_output_tokens=size - 10, tools=FUNCTIONS)
    message, call = whole.output
    assert (message.status, call.status) == ("completed", "incomplete")
    assert WEATHER.startswith(call.arguments)
    assert len(call.arguments) < len(WEATHER)


def test_thinking_can_be_turned_off(thinking):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    (message,) = recite(thinking, "It is warm.", extra_body=off)[0].output
    assert message.content[0].text == "It is warm."


def test_an_output_with_everything_can_be_sent_back(thinking):
    """As one message of the model, which has thoughts, text and calls, and not as three."""
    first, _ = recite(thinking, f"hm</think>\n{HERMES}", tools=FUNCTIONS)
    given = []
    encode = thinking.session.encode_chat
    thinking.session.encode_chat = lambda messages, **more: (
        given.append(messages) or encode(messages, **more)
    )
    try:
        call_id = first.output[2].call_id
        items = [
            *ASKED,
            *first.output,
            {"type": "function_call_output", "call_id": call_id, "output": "21 degrees"},
        ]
        second, _ = recite(thinking, "</think>It is warm.", tools=FUNCTIONS, input=items)
        recite(thinking, "</think>It is warm.", input=[*ASKED, first.output[0]])
        recite(thinking, "</think>It is warm.", input=[first.output[1], *first.output])
    finally:
        thinking.session.encode_chat = encode
    assert second.output_text == "It is warm."
    _, turn, result = given[0]
    assert (turn["role"], turn["reasoning_content"], turn["content"]) == (
        "assistant",
        "hm",
        "Let me see.",
    )
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["weather"]
    assert (result["role"], result["content"]) == ("tool", "21 degrees")
    assert given[2][1] == {"role": "assistant", "content": "", "reasoning_content": "hm"}
    said, after = given[-1]  # thoughts after a text begin another message
    assert said == {"role": "assistant", "content": "Let me see."}
    assert (after["reasoning_content"], after["content"], len(after["tool_calls"])) == (
        "hm",
        "Let me see.",
        1,
    )
