"""Every answer can be sent back as it is, in chats and in responses, to templates that do with
turns, calls and results what the published ones of their families do."""

from __future__ import annotations

from typing import Any

import pytest
from reciting_server import ARGUMENTS, HERMES_CALL, TURNS, RecitingServer
from tool_models import QUESTION, TOOLS, with_template

FUNCTIONS = [{"type": "function"} | tool["function"] for tool in TOOLS]
START = """
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}{% set content = m.content %}"""
HERMES_CALLS = """
    {%- for call in m.tool_calls or [] %}
        {%- if call.function %}{%- set call = call.function %}{%- endif %}
        {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
        {{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}"""
TOOL = """
    {%- if m.role == 'tool' %}{{ '[user]<tool_response>' + content + '</tool_response>' }}"""
QWEN2 = (
    START
    + TOOL
    + """
    {%- elif not m.tool_calls %}{{- '<|im_start|>' + m.role + '\\n' + content }}
    {%- else %}{{- '<|im_start|>' + m.role }}{% if content %}{{ '\\n' + content }}{% endif %}"""
    + HERMES_CALLS
    + """
    {%- endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}{{- '<|im_start|>assistant\\n' }}"""
)
QWEN3 = (
    START
    + TOOL
    + """
    {%- elif m.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if m.reasoning_content is defined and m.reasoning_content is not none %}
            {%- set thoughts = m.reasoning_content %}
        {%- elif '</think>' in m.content %}
            {%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set thoughts = m.content.split('</think>')[0].split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if thoughts %}
            {{- '<|im_start|>' + m.role + '\\n<think>\\n' + thoughts.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + m.role + '\\n' + content }}{% endif %}"""
    + HERMES_CALLS
    + """
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + content }}{% endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}{{- '<|im_start|>assistant\\n' }}"""
)
NULL = (  # as DeepSeek's: calls only beside content that is null
    START
    + """
    {%- if m.role == 'assistant' and m['content'] is none %}"""
    + HERMES_CALLS
    + """
    {%- elif m.role == 'assistant' and m['content'] is not none %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<|im_start|>' + content }}"""
    + HERMES_CALLS
    + """
    {%- else %}{{- '[' + m.role + ']' + content }}{% endif %}
{%- endfor %}{{- '<|im_start|>assistant\\n<think>\\n' }}"""
)
HERMES = (
    START
    + """
    {%- if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is not none %}
        {{- '<|im_start|>' + m.role }}"""
    + HERMES_CALLS
    + """
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}{{- '<|im_start|>assistant\\n' }}"""
)
LLAMA = (
    START
    + """
    {%- if m.role != 'tool' and 'tool_calls' not in m %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim }}
    {%- elif 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if content is mapping or content is iterable %}{{- content | tojson }}
        {%- else %}{{- content }}{%- endif %}
    {%- endif %}{{- '<|eot_id|>' }}
{%- endfor %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"""
)
MISTRAL = """
{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in messages %}
    {%- if not (m.role == 'tool' or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate user/assistant') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}
        {%- if tools is not none and m == user_messages[-1] %}{{- '[AVAILABLE_TOOLS] ' }}{% endif %}
        {{- '[INST] ' + m['content'] + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}{%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be strings with length 9!') }}
            {%- endif %}{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' }}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] | trim + eos_token }}
    {%- elif m['role'] == 'tool' %}
        {%- set content = m.content %}
        {%- if m.content is defined and m.content.content is defined %}
            {%- set content = m.content.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content | string + ', "call_id": "' + m.tool_call_id }}
    {%- endif %}
{%- endfor %}"""
TEMPLATES = {
    "qwen2": ("hermes", QWEN2),
    "qwen3": ("hermes", QWEN3),
    "null": ("hermes", NULL),
    "hermes": ("hermes", HERMES),
    "llama": ("llama3_json", LLAMA),
    "mistral": ("mistral", MISTRAL),
}
SEVERAL_CALLS = {
    "hermes": f"{HERMES_CALL}\n{HERMES_CALL}",
    "llama3_json": "; ".join([f'{{"name": "weather", "parameters": {ARGUMENTS}}}'] * 2),
    "mistral": TURNS["mistral"].replace(
        "}]", f'}}, {{"name": "weather", "arguments": {ARGUMENTS}}}]'
    ),
}


def answers(name: str) -> dict[str, tuple[str, int]]:
    """Return what a model may write, and after how many tokens it is cut off."""
    call = TEMPLATES[name][0]
    texts = {
        "text": ("It is warm.", 160),
        "nothing": ("", 160),
        "a call": (TURNS[call].replace("Let me see.\n", ""), 160),
        "text and a call": (TURNS[call], 160),
        "a call that is cut off": (TURNS[call], 50),
        "several calls": (SEVERAL_CALLS[call], 160),
    }
    if name not in ("qwen3", "null"):
        return texts
    start = "<think>\n" if name == "qwen3" else ""
    thoughts = {
        f"thoughts and {kind}": (f"{start}hm hm\n</think>\n\n{text}", limit + 20)
        for kind, (text, limit) in texts.items()
    }
    return (texts if name == "qwen3" else {}) | thoughts | {"thoughts": (f"{start}hm hm hm", 8)}


@pytest.fixture(scope="module")
def serve(random_bundle, tmp_path_factory):
    """Return a function that returns the server with one of TEMPLATES."""
    servers: dict[str, RecitingServer] = {}

    def make(name: str) -> RecitingServer:
        if name not in servers:
            template = TEMPLATES[name][1]
            directory = tmp_path_factory.mktemp(name) / "bundle"
            servers[name] = RecitingServer(
                with_template(random_bundle, directory, template), template
            )
        return servers[name]

    yield make
    for server in servers.values():
        server.session.close()


def post(server: RecitingServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.http.post(path, json={"model": server.session.manifest.model.name} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def check_prompt(server: RecitingServer, calls: list[dict[str, Any]], *texts: str | None) -> None:
    """Assert that the last prompt has the calls, and the texts that are not empty."""
    assert server.session.chat_template is not None
    prompt = server.session.chat_template.render(server.messages, tools=TOOLS)
    assert prompt.count('{"name": "weather", ') == len(calls)
    assert all(call["arguments"] in prompt for call in calls)
    assert all(text in prompt for text in texts if text), prompt
    assert "None" not in prompt


CASES = [(name, kind) for name in TEMPLATES for kind in answers(name)]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_message_of_a_chat_can_be_sent_back(serve, name, kind):
    server = serve(name)
    server.text, limit = answers(name)[kind]
    asked = {"messages": QUESTION, "tools": TOOLS, "max_tokens": limit}
    (choice,) = post(server, "/v1/chat/completions", **asked)["choices"]
    message = choice["message"]
    calls = message.get("tool_calls") or []
    assert len(calls) == ("call" in kind) + ("several" in kind)
    assert (choice["finish_reason"] == "length") == ("cut" in kind or kind == "thoughts")
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "21"} for call in calls]
    for turn in (message, message | {"content": message["content"] or None}):
        if turn["content"] is None and not (calls or turn.get("reasoning_content")):
            continue
        messages = [*QUESTION, turn, *results, *([] if calls else QUESTION)]
        post(server, "/v1/chat/completions", **asked | {"messages": messages})
        thoughts = message.get("reasoning_content") if name == "qwen3" else None
        shown = None if calls and name in ("hermes", "llama", "mistral") else message["content"]
        check_prompt(server, [call["function"] for call in calls], thoughts, shown)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_output_of_a_response_can_be_sent_back(serve, name, kind):
    server = serve(name)
    server.text, limit = answers(name)[kind]
    asked = {"input": QUESTION, "tools": FUNCTIONS, "max_output_tokens": limit}
    output = post(server, "/v1/responses", **asked)["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
        for call in calls
    ]
    items = [*QUESTION, *output, *results, *([] if calls else QUESTION)]
    post(server, "/v1/responses", **asked | {"input": items})
    check_prompt(server, calls)


@pytest.mark.parametrize("content", [None, ""])
def test_a_turn_needs_something(serve, content):
    """A message without text, thoughts and calls is refused if its content is null."""
    server = serve("qwen3")
    server.text = "ok"
    fields = {
        "role": "assistant",
        "content": content,
        "tool_calls": None,
        "reasoning_content": None,
    }
    body = {"model": server.session.manifest.model.name, "messages": [*QUESTION, fields, *QUESTION]}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == (400 if content is None else 200)
    if content is None:
        assert response.json()["error"]["param"] == "messages.1.content"
