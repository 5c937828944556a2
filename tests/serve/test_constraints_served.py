"""Constraints of requests that would hurt others: the server refuses each with a 400, and answers
everybody else."""

from __future__ import annotations

import asyncio
import json
import threading

import httpx
import pytest

from pass_runtime.text.child import ChildPool
from pass_server.api_error import ApiError
from pass_server.app import make_app
from pass_server.schemas import CompletionRequest
from pass_server.serve_options import ServeOptions

CHAIN = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(1500)} | {
    "a1500": {"type": "string"}
}
RULES, TERMINALS = (
    "\n".join([f"start: {x}0", *(f"{x}{i}: {x}{i + 1}" for i in range(9000)), f'{x}9000: "x"'])
    for x in ("r", "T")
)
PATTERNS = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(39)]}
REFUSED = {
    "allOf": ({"guided_json": {"$defs": CHAIN, "$ref": "#/$defs/a0"}}, "nested too deeply"),
    "rules": ({"guided_grammar": RULES}, "nested too deeply"),
    "terminals": ({"structured_outputs": {"grammar": TERMINALS}}, "nested too deeply"),
    "patterns": ({"guided_json": PATTERNS}, "too complex to compile"),
    "recursion": ({"guided_grammar": "start: start"}, "no token that could follow"),
    "alternatives": (
        {"guided_grammar": "start: " + " | ".join(f'"w{i}"' for i in range(2500))},
        "max is 2000",
    ),
}


def completion(**fields) -> dict:
    return {"model": "m", "prompt": "The quick", "max_tokens": 4, "temperature": 0, **fields}


@pytest.mark.parametrize(("fields", "why"), REFUSED.values(), ids=REFUSED)
def test_an_attack_is_a_400(server, fields, why):
    body = json.dumps(completion(**fields) | {"model": server.model})  # with surrogates as escapes
    for _ in range(2):
        answer = httpx.post(server.url + "/v1/completions", content=body, timeout=120, headers=JSON)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert why in error["message"]
        assert error["param"] == next(iter(fields))
    plain = httpx.post(
        server.url + "/v1/completions", json=completion(model=server.model), timeout=120
    )
    assert plain.status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": ["\ud800"]},
        {"guided_regex": "\ud800"},
        {"guided_json": {"const": "\ud800"}},
        {"guided_json": {"properties": {"\ud800": {}}}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_lone_surrogate_is_no_json(server, fields):
    body = json.dumps(completion(**fields) | {"model": server.model})  # with surrogates as escapes
    answer = httpx.post(server.url + "/v1/completions", content=body, timeout=120, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


JSON = {"Content-Type": "application/json"}


def test_an_ambiguous_grammar_is_a_400_of_its_own(server):
    grammar = 'start: a\na: a a a | a a | "x" | "xx" | "xxx"'
    body = completion(model=server.model, guided_grammar=grammar, max_tokens=400, min_tokens=400)
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=120)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "constraint_too_complex"
    events = httpx.post(
        server.url + "/v1/completions", json=body | {"stream": True}, timeout=120
    ).text
    assert "constraint_too_complex" in events
    assert events.endswith("data: [DONE]\n\n")


def test_text_that_spells_a_special_token_is_text(server, session):
    special = next(
        each for each in session.tokenizer.get_added_tokens_decoder().values() if each.special
    ).content
    for fields in ({"guided_choice": [special]}, {"guided_json": {"const": special}}):
        body = completion(model=server.model, max_tokens=60, **fields)
        (choice,) = httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()[
            "choices"
        ]
        assert choice["text"].strip('"') == special
        assert choice["finish_reason"] == "stop"


def test_plain_requests_do_not_wait_for_constraints(session, monkeypatch):
    """However many of them wait, and a constraint that is known does not either."""
    released, call = threading.Event(), ChildPool.call
    known = CompletionRequest(**completion(guided_regex="known"))
    plain = CompletionRequest(**completion())

    async def main() -> None:
        service = make_app(session, ServeOptions()).state.service
        await service.parse(known)
        monkeypatch.setattr(ChildPool, "call", lambda *args: released.wait(60) and call(*args))
        held = [CompletionRequest(**completion(guided_regex=f"held{i}")) for i in range(6)]
        waiting = [asyncio.create_task(service.parse(request)) for request in held]
        same = [asyncio.create_task(service.parse(held[0])) for _ in range(3)]
        for _ in range(20):
            assert (await service.parse(plain)).prompt_tokens
            assert (await service.parse(known)).constraint_kind == "regex"
        assert not any(task.done() for task in (*waiting, *same))
        waiting.pop().cancel()
        released.set()
        for parsed in await asyncio.gather(*waiting, *same):
            assert parsed.constraint_kind == "regex"

    asyncio.run(asyncio.wait_for(main(), 120))


def test_waiting_for_a_constraint_has_a_deadline_and_ends_nobody_elses(session, monkeypatch):
    released, call = threading.Event(), ChildPool.call
    monkeypatch.setattr(ChildPool, "call", lambda *args: released.wait(60) and call(*args))
    request = CompletionRequest(**completion(guided_regex="late"))

    async def main() -> None:
        hasty = make_app(session, ServeOptions(request_seconds=0.2)).state.service
        patient = make_app(session, ServeOptions()).state.service
        waiting = asyncio.create_task(patient.parse(request))
        with pytest.raises(ApiError) as refusal:
            await hasty.parse(request)
        assert refusal.value.status == 504
        released.set()
        assert (await waiting).constraint_kind == "regex"

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_request_compiles_its_constraint_once(session, monkeypatch):
    calls, call = [], ChildPool.call
    monkeypatch.setattr(ChildPool, "call", lambda *args: (calls.append(args), call(*args))[1])

    async def main() -> None:
        service = make_app(session, ServeOptions()).state.service
        request = CompletionRequest(**completion(guided_regex="once", prompt=["a", "b"], n=2))
        parsed = await asyncio.gather(*(service.parse(request) for _ in range(3)))
        assert [len(each.requests) for each in parsed] == [4, 4, 4]

    asyncio.run(main())
    assert len(calls) == 1
