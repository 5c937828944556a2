"""/v1/responses: function calls, their results, and thoughts are items of outputs and inputs."""

from __future__ import annotations

import json

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel
from reciting_server import ARGUMENTS, HERMES_TURN, RecitingServer
from running import Server
from tool_models import CLOCK, QUESTION, TEMPLATES, TOOLS, with_template

FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CALL = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ARGUMENTS}
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
    server = RecitingServer(bundle, template)
    yield server
    server.session.close()


def fields(server, **more):
    body = {"model": server.model, "input": QUESTION, "tools": FUNCTIONS, "tool_choice": "required"}
    body |= {"max_output_tokens": 400, "temperature": 1.0}
    return body | {"extra_body": {"seed": 3, "logit_bias": {"1": 12}}} | more


def recite(thinking, text, **more):
    """Let the model write `text`. Return the answer, and the events of the same answer as a stream,
    which must have the same items."""
    thinking.text = text
    name = thinking.session.manifest.model.name
    body = {"model": name, "input": QUESTION, "max_output_tokens": 200} | more
    whole = thinking.client.responses.create(**body)
    events = list(thinking.client.responses.create(**body, stream=True))
    streamed = events[-1].response
    assert events[-1].type == f"response.{whole.status}"
    assert [each.sequence_number for each in events] == list(range(len(events)))

    def without_ids(item):
        return {key: value for key, value in item.to_dict().items() if not key.endswith("id")}

    assert [*map(without_ids, streamed.output)] == [*map(without_ids, whole.output)]
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in ended] == [item.to_dict() for item in streamed.output]
    return whole, events


def test_required_calls_are_items_of_the_output(tool_server):
    answer = tool_server.client().responses.create(**fields(tool_server))
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


def test_a_named_function_is_called_once(tool_server):
    named = fields(tool_server, tool_choice={"type": "function", "name": "clock"})
    answer = tool_server.client().responses.create(**named)
    assert [call.name for call in answer.output] == ["clock"]
    assert answer.tool_choice.name == "clock"


def test_the_openai_package_parses_the_arguments(tool_server):
    function = pydantic_function_tool(Clock, name="clock")["function"]
    body = fields(tool_server, tools=[{"type": "function", **function}])
    (call, *_) = tool_server.client().responses.parse(**body).output
    assert call.parsed_arguments in ({"utc": True}, {"utc": False})
    with tool_server.client().responses.stream(**body) as stream:
        final = stream.get_final_response()
    assert final.output[0].parsed_arguments == call.parsed_arguments


def test_a_call_and_its_result_have_the_prompt_of_a_chat(tool_server):
    responses = tool_server.client().responses
    first = responses.create(**fields(tool_server, parallel_tool_calls=False))
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    second = responses.create(
        **fields(tool_server, input=[*QUESTION, call, output], tool_choice="auto")
    )
    function = {"name": call.name, "arguments": call.arguments}
    calls = [{"id": call.call_id, "type": "function", "function": function}]
    messages = [*QUESTION, {"role": "assistant", "tool_calls": calls}]
    messages.append({"role": "tool", "tool_call_id": call.call_id, "content": "21 degrees"})
    chat = tool_server.client().chat.completions.create(
        model=tool_server.model, messages=messages, tools=TOOLS, max_tokens=1
    )
    assert second.usage.input_tokens == chat.usage.prompt_tokens


def test_wrong_items_and_tools_are_refused_by_name(tool_server):
    def refused(**more):
        with pytest.raises(openai.BadRequestError) as caught:
            tool_server.client().responses.create(**fields(tool_server, **more))
        message = caught.value.body["message"]
        assert "messages." not in message and "tool_call_id" not in message
        return caught.value.param

    assert refused(input=[*QUESTION, CALL, RESULT | {"call_id": "call_2"}]) == "input.2.call_id"
    assert refused(input=[*QUESTION, CALL | {"name": "a b"}]) == "input.1.name"
    assert refused(instructions="a", input=[RESULT]) == "input.0.call_id"
    file = RESULT | {"output": [{"type": "input_file"}]}
    assert refused(input=[*QUESTION, CALL, file]) == "input.2.output"
    assert refused(tools=[FUNCTIONS[0], FUNCTIONS[0]]) == "tools"
    assert refused(tools=[]) == "tool_choice"
    assert refused(tools=[CLOCK]) == "tools.0.name"
    assert refused(tool_choice={"type": "function", "name": "other"}) == "tool_choice"


def test_thoughts_text_and_calls_are_items(thinking):
    whole, events = recite(thinking, f"hm hm</think>\n{HERMES_TURN}", tools=FUNCTIONS)
    thoughts, message, call = whole.output
    assert (thoughts.type, thoughts.content[0].text, thoughts.summary) == ("reasoning", "hm hm", [])
    assert (message.content[0].text, whole.output_text) == ("Let me see.", "Let me see.")
    assert (call.name, call.arguments, whole.status) == ("weather", ARGUMENTS, "completed")
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "hm hm"
    (added,) = (
        event.item
        for event in events
        if event.type == "response.output_item.added" and event.item.type == "function_call"
    )
    assert (added.name, added.arguments, added.call_id) == ("weather", "", events[-2].item.call_id)
    of_call = [event for event in events if "function_call_arguments" in event.type]
    assert "".join(event.delta for event in of_call[:-1]) == of_call[-1].arguments == ARGUMENTS
    assert {event.item_id for event in of_call} == {added.id}
    kinds = [event.type.removeprefix("response.") for event in events]
    distinct_kinds = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    begin_text = ["output_item.added", "content_part.added"]
    end_text = ["content_part.done", "output_item.done"]
    assert distinct_kinds == [
        *("created", "in_progress"),
        *(*begin_text, "reasoning_text.delta", "reasoning_text.done", *end_text),
        *(*begin_text, "output_text.delta", "output_text.done", *end_text),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens


def test_thoughts_and_calls_that_are_cut_off_are_incomplete(thinking):
    whole, _ = recite(thinking, "hm hm hm hm", max_output_tokens=4)
    (thoughts,) = whole.output
    assert (thoughts.type, thoughts.status) == ("reasoning", "incomplete")
    assert whole.status == "incomplete"
    assert whole.usage.output_tokens_details.reasoning_tokens == 4
    count = len(
        thinking.session.tokenizer.encode(f"</think>{HERMES_TURN}", add_special_tokens=False).ids
    )
    whole, _ = recite(
        thinking, f"</think>{HERMES_TURN}", max_output_tokens=count - 10, tools=FUNCTIONS
    )
    message, call = whole.output
    assert (message.status, call.status) == ("completed", "incomplete")
    assert ARGUMENTS.startswith(call.arguments)
    assert len(call.arguments) < len(ARGUMENTS)


def test_the_items_of_one_output_become_one_message(thinking):
    first, _ = recite(thinking, f"hm</think>\n{HERMES_TURN}", tools=FUNCTIONS)
    thoughts, text, call = first.output
    result = RESULT | {"call_id": call.call_id}
    items = [*QUESTION, thoughts, text, call, result]
    second, _ = recite(thinking, "</think>It is warm.", tools=FUNCTIONS, input=items)
    assert second.output_text == "It is warm."
    _, turn, result = thinking.messages
    texts = (turn["role"], turn["reasoning_content"], turn["content"])
    assert texts == ("assistant", "hm", "Let me see.")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["weather"]
    assert (result["role"], result["content"]) == ("tool", "21 degrees")
    recite(thinking, "</think>It is warm.", input=[*QUESTION, thoughts])
    assert thinking.messages[1] == {"role": "assistant", "reasoning_content": "hm"}
    recite(thinking, "</think>It is warm.", input=[text, thoughts, text, call])
    before, after = thinking.messages  # thoughts after a text begin another message
    assert before == {"role": "assistant", "content": "Let me see."}
    assert (after["reasoning_content"], after["content"]) == ("hm", "Let me see.")
    assert len(after["tool_calls"]) == 1
