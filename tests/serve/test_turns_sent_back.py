"""Every answer can be sent back as it is, in chats and in responses. Templates that do with turns
what published ones do are in test_templates.py and test_chat_constructs.py."""

from __future__ import annotations

from typing import Any

import pytest
from reciting_server import ARGUMENTS, HERMES_CALL, TURNS, RecitingServer
from tool_models import QUESTION, TEMPLATES, TOOLS, with_template

FUNCTIONS = [{"type": "function"} | tool["function"] for tool in TOOLS]
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


@pytest.fixture(scope="module")
def serve(random_bundle, tmp_path_factory):
    """Return a function that returns the server with one of TEMPLATES."""
    servers: dict[str, RecitingServer] = {}

    def make(name: str) -> RecitingServer:
        if name not in servers:
            directory = tmp_path_factory.mktemp(name) / "bundle"
            bundle = with_template(random_bundle, directory, TEMPLATES[name])
            servers[name] = RecitingServer(bundle, TEMPLATES[name])
        return servers[name]

    yield make
    for server in servers.values():
        server.session.close()


def post(server: RecitingServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.http.post(path, json={"model": server.session.manifest.model.name} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def check_prompt(server: RecitingServer, calls: list[dict[str, Any]], text: str | None) -> None:
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
    (choice,) = post(server, "/v1/chat/completions", **asked)["choices"]
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
        post(server, "/v1/chat/completions", **asked | {"messages": messages})
        check_prompt(server, [call["function"] for call in calls], message["content"])


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
    check_prompt(server, calls, None)


@pytest.mark.parametrize("content", [None, ""])
def test_a_turn_needs_something(serve, content):
    """A message without text, thoughts and calls is refused if its content is null."""
    server = serve("thinking")
    server.text = "ok"
    turn = {"role": "assistant", "content": content}
    turn |= {"tool_calls": None, "reasoning_content": None}
    body = {"model": server.session.manifest.model.name, "messages": [*QUESTION, turn, *QUESTION]}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == (400 if content is None else 200)
    if content is None:
        assert response.json()["error"]["param"] == "messages.1.content"
