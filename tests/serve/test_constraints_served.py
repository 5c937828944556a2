"""Constraints that are costly to compile: the server refuses them, and answers other clients."""

from __future__ import annotations

import asyncio
import threading

import pytest
from running import expect_error

from pass_runtime.text.child import Child
from pass_server.api_error import ApiError
from pass_server.app import make_app
from pass_server.schemas import CompletionRequest
from pass_server.serve_options import ServeOptions

RULES = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(9000)), 'r9000: "x"'])
PATTERNS = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(39)]}
REFUSED = {
    "rules": ({"guided_grammar": RULES}, "nested too deeply"),
    "patterns": ({"structured_outputs": {"json": PATTERNS}}, "too complex to compile"),
}
"""Costly constraints, and why each is refused."""


def completion(**fields) -> dict:
    return {"model": "m", "prompt": "The quick", "max_tokens": 4, "temperature": 0, **fields}


@pytest.mark.slow
@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_costly_constraints_are_refused(server, fields, reason):
    for _ in range(2):  # a refused constraint is remembered
        problem = expect_error(server.complete(max_tokens=4, **fields), 400)
        assert reason in problem["message"]
        assert problem["param"] == next(iter(fields))
    assert server.complete(max_tokens=4).status_code == 200


@pytest.mark.slow
def test_a_grammar_that_is_too_ambiguous_ends_the_text_with_an_error(server):
    grammar = 'start: a\na: a a a | a a | "x" | "xx" | "xxx"'
    body = {"guided_grammar": grammar, "max_tokens": 400, "min_tokens": 400}
    assert expect_error(server.complete(**body), 400)["code"] == "constraint_too_complex"
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


@pytest.fixture
def may_compile(monkeypatch):
    """Return an event: constraints are compiled while it is set, as it is at first."""
    may_compile, call = threading.Event(), Child.call
    may_compile.set()
    monkeypatch.setattr(Child, "call", lambda *args: may_compile.wait(60) and call(*args))
    return may_compile


def test_requests_wait_only_for_their_own_constraints(session, may_compile):
    """Those without a constraint, or whose constraint is compiled already, do not wait."""
    compiled = CompletionRequest(**completion(guided_regex="compiled"))
    plain = CompletionRequest(**completion())

    async def main() -> None:
        service = make_app(session, ServeOptions()).state.service
        await service.parse(compiled)
        may_compile.clear()
        held = [CompletionRequest(**completion(guided_regex=f"held{i}")) for i in range(6)]
        waiting = [asyncio.create_task(service.parse(request)) for request in held]
        same = [asyncio.create_task(service.parse(held[0])) for _ in range(3)]
        for _ in range(20):
            assert (await service.parse(plain)).prompt_tokens
            assert (await service.parse(compiled)).constraint_kind == "regex"
        assert not any(task.done() for task in (*waiting, *same))
        waiting.pop().cancel()
        may_compile.set()
        for parsed in await asyncio.gather(*waiting, *same):
            assert parsed.constraint_kind == "regex"

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_request_times_out_while_another_waits_for_the_same_constraint(session, may_compile):
    request = CompletionRequest(**completion(guided_regex="late"))

    async def main() -> None:
        may_compile.clear()
        hasty = make_app(session, ServeOptions(request_seconds=0.2)).state.service
        patient = make_app(session, ServeOptions()).state.service
        waiting = asyncio.create_task(patient.parse(request))
        with pytest.raises(ApiError) as refusal:
            await hasty.parse(request)
        assert refusal.value.status == 504
        may_compile.set()
        assert (await waiting).constraint_kind == "regex"

    asyncio.run(asyncio.wait_for(main(), 120))


def test_requests_with_one_constraint_compile_it_once(session, monkeypatch):
    calls, call = [], Child.call
    monkeypatch.setattr(Child, "call", lambda *args: (calls.append(args), call(*args))[1])

    async def main() -> None:
        service = make_app(session, ServeOptions()).state.service
        request = CompletionRequest(**completion(guided_regex="once", prompt=["a", "b"], n=2))
        parsed = await asyncio.gather(*(service.parse(request) for _ in range(3)))
        assert [len(each.requests) for each in parsed] == [4, 4, 4]
        assert all(one.processing.grammar for each in parsed for one in each.requests)

    asyncio.run(main())
    assert len(calls) == 1
