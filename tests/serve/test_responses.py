"""/v1/responses with the openai package: texts, events of streams, formats, refused requests."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from metered import written
from pydantic import BaseModel

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "for i in range"}]
OPTIONS = {"chat": True, "temperature": 0.7, "seed": 3}
"""What the requests of `fields` ask of a session."""
END = {"1": 12}
"""A bias with which the random model ends its text as soon as a constraint allows it."""


class Answer(BaseModel):
    city: Literal["Paris", "Rome"]
    sure: bool


def fields(server, **more):
    """Return the arguments of a request with the openai package."""
    body = {"model": server.model, "input": TURNS, "temperature": 0.7, "max_output_tokens": 24}
    return body | {"extra_body": {"seed": 3}} | more


def ask(server, **more):
    """Send a short request without the openai package."""
    body = {"model": server.model, "input": "The quick", "max_output_tokens": 4, "seed": 3}
    return server.post("/v1/responses", body | more)


def test_a_response_has_the_text_and_usage_of_a_session(server, session):
    answer = server.client().responses.create(**fields(server), metadata={"a": "b"})
    generation = written(session, TURNS, **OPTIONS)
    assert answer.output_text == generation.text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert answer.metadata == {"a": "b"}
    assert (answer.store, answer.previous_response_id, answer.error) == (False, None, None)
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.7, 1.0, 24)
    usage = answer.usage
    assert usage.input_tokens == len(generation.prompt_ids)
    assert usage.output_tokens == len(generation.token_ids)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert answer.model_extra["pass"]["seed"] == 3


def test_instructions_are_a_system_message(server, session):
    answer = server.client().responses.create(
        **fields(server, input="for i in range"), instructions="Be brief."
    )
    assert answer.output_text == written(session, TURNS, **OPTIONS).text
    assert answer.instructions == "Be brief."


def test_input_items_are_messages_of_a_chat(server, session):
    """Both the items that clients write, and those of earlier answers."""

    def texts(*parts):
        return [{"type": "input_text", "text": part} for part in parts]

    earlier = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
    answer = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    items = [
        {"type": "message", "role": "developer", "content": texts("Be brief.")},
        TURNS[1],
        answer | {"content": [earlier]},
        {"role": "user", "content": texts("a", "b")},
    ]
    messages = [*TURNS, {"role": "assistant", "content": "Yes."}]
    messages.append({"role": "user", "content": "a\nb"})
    response = server.client().responses.create(**fields(server, input=items))
    assert response.output_text == written(session, messages, **OPTIONS).text


@pytest.mark.parametrize("ends", [False, True])
def test_the_events_of_a_stream_make_up_the_whole_answer(server, session, ends):
    """ends: whether a stop string completes the text, or `max_output_tokens` cut it off."""
    full_text = written(session, TURNS, **OPTIONS).text
    more = {"seed": 3} | ({"stop": full_text[len(full_text) // 2 :]} if ends else {})
    whole = server.client().responses.create(**fields(server, extra_body=more))
    events = list(server.client().responses.create(**fields(server, extra_body=more), stream=True))
    assert whole.status == ("completed" if ends else "incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == whole.output_text
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    done = ["output_text.done", "content_part.done", "output_item.done", whole.status]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [*begin, *["output_text.delta"] * len(deltas), *done]
    created, *_, text, part, item, last = events
    assert created.response.status == "in_progress"
    texts = (text.text, part.part.text, item.item.content[0].text, last.response.output_text)
    assert {*texts} == {whole.output_text}
    ids = {each.item_id for each in [*deltas, text, part]}
    assert ids == {item.item.id} == {last.response.output[0].id}
    assert last.response.id == created.response.id
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert last.response.model_extra["pass"]["seed"] == 3


def test_events_are_named_and_nothing_follows_the_last(server):
    lines = ask(server, stream=True).text.split("\n\n")
    assert lines.pop() == ""
    for event in lines:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]
    assert "response.incomplete" in lines[-1]


def test_the_openai_package_parses_a_streamed_answer(server):
    body = fields(
        server, extra_body={"seed": 3, "logit_bias": END}, max_output_tokens=200, text_format=Answer
    )
    with server.client().responses.stream(**body) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert seen[-1] == "response.completed"
    assert isinstance(final.output_parsed, Answer)


def test_an_answer_without_text_is_an_empty_message(server):
    answer = ask(server, logit_bias={"1": 100}).json()
    assert answer["status"] == "completed"
    assert answer["output"][0]["content"][0]["text"] == ""


def test_text_formats_are_response_formats_of_a_chat(server):
    responses = server.client().responses
    body = fields(server, extra_body={"seed": 3, "logit_bias": END}, max_output_tokens=300)
    parsed = responses.parse(**body, text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    assert parsed.text.format.name == "Answer"
    anything = responses.create(**fields(server), text={"format": {"type": "json_object"}})
    chat = {"messages": TURNS, "temperature": 0.7, "seed": 3, "max_tokens": 24}
    same = server.chat(**chat, response_format={"type": "json_object"}).json()
    assert anything.output_text == same["choices"][0]["message"]["content"]
    assert anything.output_text.startswith("{")
    plain = responses.create(**fields(server), text={"format": {"type": "text"}})
    assert plain.text.format.type == "text"
