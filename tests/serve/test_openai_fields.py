"""Requests as clients of OpenAI's API write them: fields that are null, fields that change no text,
and errors that name the field at fault."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from in_process import App
from pydantic import TypeAdapter
from running import expect_error
from tool_models import HERMES, QUESTION, TOOLS, with_template

from pass_runtime import LoadOptions, load
from pass_runtime.text.templates import ChatTemplate
from pass_server.responses_input import ResponsesRequest
from pass_server.schemas import BoundedObject, ChatRequest, CompletionRequest

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
FUNCTION = {"name": "weather"}
CALL = {"id": "a", "type": "function", "function": FUNCTION | {"arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "21", "tool_call_id": "a"}
CALL_ITEM = {"type": "function_call", "call_id": "a", "arguments": "{}"} | FUNCTION
RESULT_ITEM = {"type": "function_call_output", "call_id": "a", "output": "21"}
PART = {"type": "text", "text": "a"}
ITEM_PART = {"type": "input_text", "text": "a"}


def chat(*messages: Any, **more: Any) -> tuple[type, dict[str, Any]]:
    return ChatRequest, BASES[ChatRequest] | {"messages": [*QUESTION, *messages]} | more


def response(*items: Any, **more: Any) -> tuple[type, dict[str, Any]]:
    return ResponsesRequest, BASES[ResponsesRequest] | {"input": [*QUESTION, *items]} | more


def user(*parts: Any) -> tuple[type, dict[str, Any]]:
    return chat({"role": "user", "content": [*parts]})


def input_of(*parts: Any) -> tuple[type, dict[str, Any]]:
    return response({"role": "user", "content": [*parts]})


OBJECTS = [*BoundedObject.__subclasses__()]
for each in OBJECTS:  # which grows
    OBJECTS += each.__subclasses__()


@pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)
def test_what_is_null_or_neutral_is_as_if_absent(model):
    """Also a field that nobody knows yet."""
    base = BASES[model]
    plain = model.model_validate(base)
    for name in {*model.model_fields, *model.neutral, "new_field"} - base.keys():
        for value in (None, *model.neutral.get(name, ())):
            assert model.model_validate(base | {name: value}) == plain, (name, value)
    for name in base:
        with pytest.raises(ValueError, match=name):
            model.model_validate(base | {name: None})


@pytest.mark.parametrize("kind", OBJECTS, ids=lambda kind: kind.__name__)
def test_a_field_of_an_object_that_is_null_is_as_if_absent(kind):
    for name, field in kind.model_fields.items():
        if not field.is_required() and not isinstance(field.default, str):
            assert field.default is None, name
            TypeAdapter(Annotated[field.annotation, field]).validate_python(None)
    unknown = {"new_field", *kind.neutral} - {*kind.known}
    assert kind._bounded(dict.fromkeys(unknown)) == {}


CACHED = {"type": "ephemeral", "ttl": "1h"}
BREAKPOINT = {"mode": "explicit", "ttl": "30m"}


@pytest.fixture(scope="module")
def client(random_bundle, tmp_path_factory):
    """Return a client of an app whose model takes tools."""
    bundle = with_template(random_bundle, tmp_path_factory.mktemp("fields") / "bundle", HERMES)
    with load(bundle, LoadOptions("cpu", threads=1)) as session:
        yield App(session)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/responses"])
def test_the_model_never_sees_what_should_stay_cached(client, monkeypatch, path):
    """In texts, messages, calls and tools."""
    tool, cached, seen = TOOLS[0], {"cache_control": CACHED}, []
    marked = cached | {"prompt_cache_breakpoint": BREAKPOINT}
    render = ChatTemplate.render

    def recorded(template, messages, **variables):
        seen.append((messages, variables))
        return render(template, messages, **variables)

    def ask(part, other):
        """part: what is added to a text. other: what is added to all else."""
        if path == "/tokenize":
            body = {
                "messages": [
                    {"role": "user", "content": [PART | part]},
                    CALLED | other,
                    RESULT | {"content": [PART | other]} | other,
                ],
                "tools": [tool | other | {"function": tool["function"] | other}],
            }
        else:
            items = [{"role": "user", "content": [ITEM_PART | part]}, CALL_ITEM | other]
            items.append(RESULT_ITEM | {"output": [ITEM_PART | other]})
            body = {"model": "m", "input": items, "max_output_tokens": 1}
            body["tools"] = [{"type": "function"} | tool["function"] | other]
        answer = client.post(path, body).json()
        return answer.get("tokens") or answer["tools"]

    monkeypatch.setattr(ChatTemplate, "render", recorded)
    assert ask(marked, cached) == ask({}, {})
    assert len(seen) == 2 and seen[0] == seen[1] and "weather" in str(seen)


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
    problem = expect_error(client.post(PATHS[model], fields), 400)
    assert problem["param"] == param, problem
    assert why in problem["message"]
