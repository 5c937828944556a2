"""Constraints that are costly to compile: the server refuses them, and answers other clients."""

from __future__ import annotations

import asyncio
import threading

import pytest
from running import error

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
ALTERNATIVES = "start: " + " | ".join(f'"w{i}"' for i in range(2500))
REFUSED = {
    "allOf": ({"guided_json": {"$defs": CHAIN, "$ref": "#/$defs/a0"}}, "nested too deeply"),
    "rules": ({"guided_grammar": RULES}, "nested too deeply"),
    "terminals": ({"structured_outputs": {"grammar": TERMINALS}}, "nested too deeply"),
    "patterns": ({"guided_json": PATTERNS}, "too complex to compile"),
    "recursion": ({"guided_grammar": "start: start"}, "no token that could follow"),
    "alternatives": ({"guided_grammar": ALTERNATIVES}, "max is 2000"),
}


def completion(**fields) -> dict:
    return {"model": "m", "prompt": "The quick", "max_tokens": 4, "temperature": 0, **fields}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "why"), REFUSED.values(), ids=REFUSED)
def test_costly_constraints_are_refused(server, fields, why):
    for _ in range(2):
        problem = error(server.complete(max_tokens=4, **fields), 400)
        assert why in problem["message"]
        assert problem["param"] == next(iter(fields))
    assert server.complete(max_tokens=4).status_code == 200


@pytest.mark.slow
def test_an_ambiguous_grammar_is_too_complex(server):
    grammar = 'start: a\na: a a a | a a | "x" | "xx" | "xxx"'
    body = {"guided_grammar": grammar, "max_tokens": 400, "min_tokens": 400}
    assert error(server.complete(**body), 400)["code"] == "constraint_too_complex"
    events = server.complete(**body, stream=True).text
    assert "constraint_too_complex" in events
    assert events.endswith("data: [DONE]\n\n")


def test_a_constraint_may_allow_text_that_spells_a_special_token(server, session):
    added = session.tokenizer.get_added_tokens_decoder().values()
    special = next(token for token in added if token.special).content
    for fields in ({"guided_choice": [special]}, {"guided_json": {"const": special}}):
        (choice,) = server.complete(max_tokens=60, **fields).json()["choices"]
        assert choice["text"].strip('"') == special
        assert choice["finish_reason"] == "stop"


def test_plain_requests_do_not_wait_for_constraints(session, monkeypatch):
    """Neither do requests whose constraint is already compiled."""
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


def test_a_request_times_out_while_another_waits_for_the_same_constraint(session, monkeypatch):
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


def test_requests_with_one_constraint_compile_it_once(session, monkeypatch):
    calls, call = [], ChildPool.call
    monkeypatch.setattr(ChildPool, "call", lambda *args: (calls.append(args), call(*args))[1])

    async def main() -> None:
        service = make_app(session, ServeOptions()).state.service
        request = CompletionRequest(**completion(guided_regex="once", prompt=["a", "b"], n=2))
        parsed = await asyncio.gather(*(service.parse(request) for _ in range(3)))
        assert [len(each.requests) for each in parsed] == [4, 4, 4]

    asyncio.run(main())
    assert len(calls) == 1
