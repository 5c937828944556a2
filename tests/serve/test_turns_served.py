"""The server separates thoughts, content and calls of turns that a model writes unconstrained, in
chats and in responses, and every answer can be sent back as it is. The tests choose what the model
writes. Templates like published ones are in test_templates.py and test_chat_constructs.py."""

from __future__ import annotations

import json

import openai
import pytest
from reciting import EOS
from reciting_server import ARGUMENTS, HERMES_CALL, HERMES_TURN, TURNS, RecitingServer
from tool_models import FUNCTIONS, QUESTION, TEMPLATES, TOOLS, with_template

CALL_RESULT = {"type": "function_call_output", "output": "21 degrees"}


@pytest.fixture(scope="module")
def serve(random_bundle, tmp_path_factory):
    """Return a function that returns a server with one of TEMPLATES. options: of ServeOptions."""
    servers = {}

    def make(name, **options):
        key = (name, *options.items())
        if key not in servers:
            directory = tmp_path_factory.mktemp(name) / "bundle"
            bundle = with_template(random_bundle, directory, TEMPLATES[name])
            servers[key] = RecitingServer(bundle, TEMPLATES[name], **options)
        return servers[key]

    yield make
    for server in servers.values():
        server.session.close()


@pytest.fixture(scope="module")
def thinking(serve):
    return serve("thinking")


@pytest.fixture(scope="module")
def hermes(serve):
    return serve("hermes")


def post(server, path, **fields):
    response = server.post(f"/v1/{path}", {"model": "m"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_without_tools_nothing_is_a_call(hermes):
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice, _ = hermes.ask(HERMES_TURN, **more)
        assert choice.message.content == HERMES_TURN
        assert choice.message.tool_calls is None


def test_logprobs_come_with_every_token(hermes):
    choice, _ = hermes.ask(HERMES_TURN, tools=TOOLS, logprobs=True)
    body = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 200}
    stream = hermes.client().chat.completions.create(**body, logprobs=True, stream=True)
    logprobs = [each.logprobs for chunk in stream for each in chunk.choices if each.logprobs]
    streamed = [entry.token for each in logprobs for entry in each.content]
    assert streamed == [entry.token for entry in choice.logprobs.content]
    assert "".join(streamed).startswith(HERMES_TURN)


def test_thoughts_are_no_content(thinking):
    choice, deltas = thinking.ask("hm <x>\n</think>\n\nIt is warm.")
    assert choice.message.model_extra["reasoning_content"] == "hm <x>"
    assert choice.message.content == "It is warm."
    assert sum("reasoning_content" in (delta.model_extra or {}) for delta in deltas) > 2


THOUGHTS = {
    "and text": ("hm hm</think>\n\nIt is warm.", 200, "hm hm</think>"),
    "and a call": (f"hm hm</think>\n{HERMES_CALL}", 200, "hm hm</think>"),
    "that are cut off": ("hm hm hm hm", 4, "hm hm hm hm"),
    "that may end": ("hm <", 200, "hm <"),
    "none": ("</think>\n\nIt is warm.", 200, ""),
}
"""What a model writes, after how many tokens it is cut off, and the part before its answer."""


@pytest.mark.parametrize(("text", "limit", "thoughts"), THOUGHTS.values(), ids=THOUGHTS)
def test_usage_counts_the_tokens_of_thoughts(thinking, text, limit, thoughts):
    """In a whole answer, in a stream, for all choices together, and in responses."""
    thinking.text = text
    fields = {"messages": QUESTION, "tools": TOOLS, "max_tokens": limit, "seed": 1}
    usage = post(thinking, "chat/completions", **fields)["usage"]
    count = usage["completion_tokens_details"]["reasoning_tokens"]
    before = len(thinking.ids_of(thoughts))
    if usage["completion_tokens"] == limit:
        assert count == limit
    else:
        assert before <= count <= before + 3 * bool(thoughts)  # the rest: an end, or white space
        assert bool(count) == bool(thoughts)

    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    lines = thinking.chat(**fields, **streaming).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    both = post(thinking, "chat/completions", **fields, n=2)["usage"]
    assert both["completion_tokens_details"] == {"reasoning_tokens": 2 * count}
    assert both["completion_tokens"] == 2 * usage["completion_tokens"]
    fields = {"input": QUESTION, "tools": FUNCTIONS, "max_output_tokens": limit}
    answer = post(thinking, "responses", **fields)["usage"]
    assert answer["output_tokens_details"] == {"reasoning_tokens": count}


def test_usage_without_thoughts_counts_none(hermes):
    """In completions, and in chats of a model that has no thoughts."""
    hermes.text = "It is warm."
    for answer in (hermes.complete(max_tokens=5), hermes.chat(max_tokens=5)):
        details = answer.json()["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": 0}


@pytest.mark.slow
def test_thinking_can_be_turned_off(thinking):
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    choice, _ = thinking.ask("It is warm.", extra_body=off)
    assert choice.message.content == "It is warm."
    for name in ("temper", "messages", "enable-thinking", "documents", "eos_token"):
        kwargs = {name: "a"}
        with pytest.raises(openai.BadRequestError) as caught:
            thinking.ask("a", extra_body={"chat_template_kwargs": kwargs})
        assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("thoughts", ["hm { ", ""])
def test_a_response_format_applies_after_thoughts(thinking, thoughts):
    """Thoughts are unconstrained. After them the model can only write text of the format."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["no", "yes"]}}}
    choice, _ = thinking.ask(f'{thoughts}</think>\n"no"', response_format=form)
    assert choice.message.content == '"no"'
    assert choice.message.model_extra.get("reasoning_content", "") == thoughts.strip()


def test_options_choose_the_parsers_of_thoughts_and_calls(serve):
    plain = serve("thinking", reasoning_parser="none", tool_call_parser="none")
    choice, _ = plain.ask("hm</think>\n\nIt is warm.")
    assert choice.message.content == "hm</think>\n\nIt is warm."
    with pytest.raises(openai.BadRequestError) as caught:
        plain.ask(HERMES_TURN, tools=TOOLS)
    assert caught.value.param == "tools"
    other = serve("hermes", tool_call_parser="llama3_json")
    choice, _ = other.ask(TURNS["llama3_json"], tools=TOOLS)
    assert len(choice.message.tool_calls) == 1


def test_special_tokens_that_tools_and_results_spell_are_text(hermes):
    function = dict(TOOLS[0]["function"], name="f", description="a<eos>b")
    tools = [{"type": "function", "function": function}]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "<eos>"}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "<eos>"},
    ]
    begun = []
    begin = hermes.session.begin
    hermes.session.begin = lambda requests, *rest: begun.append(requests) or begin(requests, *rest)
    try:
        hermes.ask("ok", tools=tools, messages=messages)
    finally:
        hermes.session.begin = begin
    ids = begun[0][0].prompt_ids
    assert EOS not in ids
    assert hermes.session.tokenizer.decode(list(ids)).count("<eos>") == 2


def test_thoughts_text_and_calls_are_items(thinking):
    whole, events = thinking.respond(f"hm hm</think>\n{HERMES_TURN}", tools=FUNCTIONS)
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
    whole, _ = thinking.respond("hm hm hm hm", max_output_tokens=4)
    (thoughts,) = whole.output
    assert (thoughts.type, thoughts.status) == ("reasoning", "incomplete")
    assert whole.status == "incomplete"
    assert whole.usage.output_tokens_details.reasoning_tokens == 4
    turn = f"</think>{HERMES_TURN}"
    limit = len(thinking.ids_of(turn)) - 10
    whole, _ = thinking.respond(turn, max_output_tokens=limit, tools=FUNCTIONS)
    message, call = whole.output
    assert (message.status, call.status) == ("completed", "incomplete")
    assert ARGUMENTS.startswith(call.arguments)
    assert len(call.arguments) < len(ARGUMENTS)


def test_the_items_of_one_output_become_one_message(thinking):
    first, _ = thinking.respond(f"hm</think>\n{HERMES_TURN}", tools=FUNCTIONS)
    thoughts, text, call = first.output
    result = CALL_RESULT | {"call_id": call.call_id}
    items = [*QUESTION, thoughts, text, call, result]
    second, _ = thinking.respond("</think>It is warm.", tools=FUNCTIONS, input=items)
    assert second.output_text == "It is warm."
    _, turn, result = thinking.messages
    texts = (turn["role"], turn["reasoning_content"], turn["content"])
    assert texts == ("assistant", "hm", "Let me see.")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["weather"]
    assert (result["role"], result["content"]) == ("tool", "21 degrees")
    thinking.respond("</think>It is warm.", input=[*QUESTION, thoughts])
    assert thinking.messages[1] == {"role": "assistant", "reasoning_content": "hm"}
    thinking.respond("</think>It is warm.", input=[text, thoughts, text, call])
    before, after = thinking.messages  # thoughts after a text begin another message
    assert before == {"role": "assistant", "content": "Let me see."}
    assert (after["reasoning_content"], after["content"]) == ("hm", "Let me see.")
    assert len(after["tool_calls"]) == 1


SEVERAL_CALLS = {
    "hermes": f"{HERMES_CALL}\n{HERMES_CALL}",
    "llama3_json": "; ".join([f'{{"name": "weather", "parameters": {ARGUMENTS}}}'] * 2),
    "mistral": TURNS["mistral"].replace(
        "}]", f'}}, {{"name": "weather", "arguments": {ARGUMENTS}}}]'
    ),
}


def answers(name: str) -> dict[str, tuple[str, int]]:
    """Return what a model may write, and after how many tokens it is cut off."""
    call = "hermes" if name == "thinking" else name
    texts = {
        "text": ("It is warm.", 160),
        "nothing": ("", 160),
        "a call": (TURNS[call].replace("Let me see.\n", ""), 160),
        "text and a call": (TURNS[call], 160),
        "a call that is cut off": (TURNS[call], 50),
        "several calls": (SEVERAL_CALLS[call], 160),
    }
    if name != "thinking":
        return texts
    thoughts = {
        f"thoughts and {kind}": (f"hm hm\n</think>\n\n{text}", limit + 20)
        for kind, (text, limit) in texts.items()
    }
    return thoughts | {"thoughts": ("hm hm hm", 3)}


def check_prompt(server, calls, text):
    """Assert that the last prompt has the calls and the text."""
    prompt = server.session.chat_template.render(server.messages, tools=TOOLS)
    assert prompt.count('{"name": "weather", ') == len(calls)
    assert all(call["arguments"] in prompt for call in calls)
    assert (text or "") in prompt and "None" not in prompt


CASES = [(name, kind) for name in TEMPLATES for kind in answers(name)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_message_of_a_chat_can_be_sent_back(serve, name, kind):
    server = serve(name)
    server.text, limit = answers(name)[kind]
    asked = {"messages": QUESTION, "tools": TOOLS, "max_tokens": limit}
    (choice,) = post(server, "chat/completions", **asked)["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    assert len(calls) == ("call" in kind) + ("several" in kind)
    cut = "cut" in kind or kind == "thoughts"
    assert choice["finish_reason"] == ("length" if cut else "tool_calls" if calls else "stop")
    if not cut:
        assert all(call["function"]["arguments"] == ARGUMENTS for call in calls)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "21"} for call in calls]
    for turn in (message, message | {"content": message["content"] or None}):
        if turn["content"] is None and not (calls or turn.get("reasoning_content")):
            continue
        messages = [*QUESTION, turn, *results, *([] if calls else QUESTION)]
        post(server, "chat/completions", **asked | {"messages": messages})
        check_prompt(server, [call["function"] for call in calls], message["content"])


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_output_of_a_response_can_be_sent_back(serve, name, kind):
    server = serve(name)
    server.text, limit = answers(name)[kind]
    asked = {"input": QUESTION, "tools": FUNCTIONS, "max_output_tokens": limit}
    output = post(server, "responses", **asked)["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
        for call in calls
    ]
    items = [*QUESTION, *output, *results, *([] if calls else QUESTION)]
    post(server, "responses", **asked | {"input": items})
    check_prompt(server, calls, None)


@pytest.mark.parametrize("content", [None, ""])
def test_a_turn_needs_something(serve, content):
    """A message without text, thoughts and calls is refused if its content is null."""
    server = serve("thinking")
    server.text = "ok"
    turn = {"role": "assistant", "content": content}
    turn |= {"tool_calls": None, "reasoning_content": None}
    response = server.chat(messages=[*QUESTION, turn, *QUESTION])
    assert response.status_code == (400 if content is None else 200)
    if content is None:
        assert response.json()["error"]["param"] == "messages.1.content"
