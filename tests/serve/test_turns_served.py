"""Turns that a model writes of its own accord: the server tells thoughts, text and calls apart. The
model recites."""

from __future__ import annotations

import json

import openai
import pytest
from recited import ASKED, EOS, HERMES, TEXTS, WEATHER, Reciter
from tool_models import TEMPLATES, TOOLS, with_template


@pytest.fixture(scope="module")
def reciter(random_bundle, tmp_path_factory):
    """Makes servers."""
    made = []

    def make(name, **options):
        directory = tmp_path_factory.mktemp(name) / "bundle"
        made.append(
            Reciter(
                with_template(random_bundle, directory, TEMPLATES[name]), TEMPLATES[name], **options
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.session.close()


@pytest.fixture(scope="module")
def thinking(reciter):
    return reciter("thinking")


@pytest.fixture(scope="module")
def hermes(reciter):
    return reciter("hermes")


@pytest.mark.parametrize("form", TEXTS)
def test_a_call_of_its_own_accord(reciter, form):
    server = reciter(form)
    choice, deltas = server.ask(TEXTS[form], tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", WEATHER)
    assert choice.message.content == ("Let me see." if form == "hermes" else None)
    assert sum(bool(delta.tool_calls) for delta in deltas) > 3  # they come while they are written


def test_what_is_no_call_stays_text(hermes):
    for text in (
        "It is warm.",
        "1 < 2 <tool_ ",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "",
    ):
        choice, _ = hermes.ask(text, tools=TOOLS)
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert choice.message.tool_calls is None


def test_without_tools_nothing_is_a_call(hermes):
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice, _ = hermes.ask(HERMES, **more)
        assert choice.message.content == HERMES
        assert choice.message.tool_calls is None


def test_a_call_that_is_cut_off(hermes):
    choice, _ = hermes.ask(HERMES, tools=TOOLS, max_tokens=48)
    assert choice.finish_reason == "length"
    arguments = choice.message.tool_calls[0].function.arguments
    assert 0 < len(arguments) < len(WEATHER)
    assert WEATHER.startswith(arguments)


def test_several_calls(hermes):
    one = f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER}}}\n</tool_call>'
    choice, _ = hermes.ask(f'{one}\n{one}\n<tool_call>{{"name": "clock"}}</tool_call>', tools=TOOLS)
    assert [call.function.name for call in choice.message.tool_calls] == [
        "weather",
        "weather",
        "clock",
    ]
    assert choice.message.tool_calls[2].function.arguments == "{}"


def test_logprobs_come_with_every_token(hermes):
    choice, _ = hermes.ask(HERMES, tools=TOOLS, logprobs=True)
    own = {
        "model": hermes.session.manifest.model.name,
        "messages": ASKED,
        "max_tokens": 200,
        "tools": TOOLS,
    }
    stream = hermes.client.chat.completions.create(**own, logprobs=True, stream=True)
    streamed = [
        entry
        for chunk in stream
        for c in chunk.choices
        if c.logprobs
        for entry in c.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]
    assert "".join(entry.token for entry in streamed).startswith(HERMES)


def test_thoughts_are_apart(thinking):
    choice, deltas = thinking.ask("hm <x>\n</think>\n\nIt is warm.")
    assert choice.message.model_extra["reasoning_content"] == "hm <x>"
    assert choice.message.content == "It is warm."
    assert sum("reasoning_content" in (delta.model_extra or {}) for delta in deltas) > 2


def test_thoughts_then_a_call(thinking):
    choice, _ = thinking.ask(f"hm</think>\n{HERMES}", tools=TOOLS)
    assert choice.message.model_extra["reasoning_content"] == "hm"
    assert choice.message.content == "Let me see."
    assert len(choice.message.tool_calls) == 1


def test_thoughts_that_are_cut_off_are_no_text(thinking):
    choice, _ = thinking.ask("hm hm hm hm", max_tokens=4)
    assert choice.message.content == ""
    assert "hm hm".startswith(choice.message.model_extra["reasoning_content"])


def test_thinking_can_be_turned_off(thinking):
    choice, _ = thinking.ask(
        "It is warm.", extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert choice.message.content == "It is warm."
    for kwargs in (
        {"temper": 1},
        {"messages": "a"},
        {"enable-thinking": 1},
        {"documents": "a"},
        {"eos_token": "a"},
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            thinking.ask("a", extra_body={"chat_template_kwargs": kwargs})
        assert caught.value.param == "chat_template_kwargs"


def test_a_turn_of_calls_has_no_content(hermes):
    """As in Hugging Face, where messages have no fields that are null. Templates ask for that."""
    called, _ = hermes.ask(HERMES.removeprefix("Let me see.\n"), tools=TOOLS)
    assert called.message.content is None
    (call,) = called.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    hermes.ask("It is warm.", messages=[*ASKED, called.message, result], tools=TOOLS)
    assert "content" not in hermes.messages[1]


@pytest.mark.parametrize("thoughts", ["hm { ", ""])
def test_a_form_comes_after_thoughts(thinking, thoughts):
    """The thoughts are free, and the model's wish to write something else than the form comes to
    nothing."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["no", "yes"]}}}
    choice, _ = thinking.ask(f'{thoughts}</think>\n"no"', response_format=form)
    assert choice.message.content == '"no"'
    assert choice.message.model_extra.get("reasoning_content", "") == thoughts.strip()
    choice, _ = thinking.ask(
        "</think>It is warm.", response_format=form, tools=TOOLS, tool_choice="auto"
    )
    assert choice.message.tool_calls or json.loads(choice.message.content) in ("no", "yes")


def test_parsers_are_options(reciter):
    plain = reciter("thinking", reasoning_parser="none", tool_call_parser="none")
    choice, _ = plain.ask("hm</think>\n\nIt is warm.")
    assert choice.message.content == "hm</think>\n\nIt is warm."
    with pytest.raises(openai.BadRequestError) as caught:
        plain.ask(HERMES, tools=TOOLS)
    assert caught.value.param == "tools"
    other = reciter("hermes", tool_call_parser="llama3_json")
    choice, _ = other.ask(TEXTS["llama3_json"], tools=TOOLS)
    assert len(choice.message.tool_calls) == 1


def test_special_tokens_that_tools_and_results_spell_are_text(hermes):
    """As those of messages."""
    spelling = [dict(TOOLS[0]["function"], name="f", description="a<eos>b")]
    tools = [{"type": "function", "function": each} for each in spelling]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "<eos>"}'}}
    talk = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "<eos>"},
    ]
    found = []
    begin = hermes.session.begin
    hermes.session.begin = lambda requests, *rest: found.append(requests) or begin(requests, *rest)
    try:
        hermes.ask("ok", tools=tools, messages=talk)
    finally:
        hermes.session.begin = begin
    ids = found[0][0].prompt_ids
    assert EOS not in ids
    assert hermes.session.tokenizer.decode(list(ids)).count("<eos>") == 2
