"""The server separates thoughts, content and calls of turns that a model writes unconstrained. The
tests choose what the model writes."""

from __future__ import annotations

import json

import openai
import pytest
from reciting import EOS
from reciting_server import HERMES_CALL, HERMES_TURN, TURNS, RecitingServer
from tool_models import QUESTION, TEMPLATES, TOOLS, with_template


@pytest.fixture(scope="module")
def serve(random_bundle, tmp_path_factory):
    """Return a function that makes a server with one of TEMPLATES."""
    servers = []

    def make(name, **options):
        directory = tmp_path_factory.mktemp(name) / "bundle"
        bundle = with_template(random_bundle, directory, TEMPLATES[name])
        servers.append(RecitingServer(bundle, TEMPLATES[name], **options))
        return servers[-1]

    yield make
    for server in servers:
        server.session.close()


@pytest.fixture(scope="module")
def thinking(serve):
    return serve("thinking")


@pytest.fixture(scope="module")
def hermes(serve):
    return serve("hermes")


def test_without_tools_nothing_is_a_call(hermes):
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice, _ = hermes.ask(HERMES_TURN, **more)
        assert choice.message.content == HERMES_TURN
        assert choice.message.tool_calls is None


def test_logprobs_come_with_every_token(hermes):
    choice, _ = hermes.ask(HERMES_TURN, tools=TOOLS, logprobs=True)
    body = {"model": hermes.session.manifest.model.name, "messages": QUESTION, "tools": TOOLS}
    stream = hermes.client.chat.completions.create(
        **body, max_tokens=200, logprobs=True, stream=True
    )
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
    thinking.text, name = text, thinking.session.manifest.model.name
    body = {"model": name, "messages": QUESTION, "tools": TOOLS, "max_tokens": limit, "seed": 1}
    url = "/v1/chat/completions"
    usage = thinking.http.post(url, json=body).json()["usage"]
    count = usage["completion_tokens_details"]["reasoning_tokens"]
    before = len(thinking.session.tokenizer.encode(thoughts, add_special_tokens=False).ids)
    if usage["completion_tokens"] == limit:
        assert count == limit
    else:
        assert before <= count <= before + 3 * bool(thoughts)  # the rest: an end, or white space
        assert bool(count) == bool(thoughts)

    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    lines = thinking.http.post(url, json=body | streaming).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    both = thinking.http.post(url, json=body | {"n": 2}).json()["usage"]
    assert both["completion_tokens_details"] == {"reasoning_tokens": 2 * count}
    assert both["completion_tokens"] == 2 * usage["completion_tokens"]
    functions = [{"type": "function"} | tool["function"] for tool in TOOLS]
    fields = {"model": name, "input": QUESTION, "tools": functions, "max_output_tokens": limit}
    answer = thinking.http.post("/v1/responses", json=fields).json()["usage"]
    assert answer["output_tokens_details"] == {"reasoning_tokens": count}


def test_usage_without_thoughts_counts_none(hermes):
    """In completions, and in chats of a model that has no thoughts."""
    hermes.text, name = "It is warm.", hermes.session.manifest.model.name
    for path, prompt in (("completions", {"prompt": "a"}), ("chat/completions", {})):
        body = {"model": name, "messages": QUESTION, "max_tokens": 5}
        if prompt:
            body = {"model": name, "max_tokens": 5} | prompt
        usage = hermes.http.post(f"/v1/{path}", json=body).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


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
