"""A request has a deadline, whatever it waits for, and a place in the queue from its arrival on. It
waits for its own constraints alone."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from dataclasses import replace

import pytest
from in_process import App
from metered import wait_until

from pass_runtime.text.child import Child
from pass_server import streaming
from pass_server.answers import CompletionFormatter
from pass_server.api_error import ApiError
from pass_server.request import prompt_bytes
from pass_server.schemas import ChatRequest, CompletionRequest
from pass_server.service import LONG_TEXT_BYTES
from pass_server.streaming import GenerationResponse

pytestmark = pytest.mark.anyio
REQUEST = CompletionRequest(model="m", prompt="The quick", max_tokens=4, temperature=0)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def no_request_of_an_earlier_test(session):
    gc.collect()
    wait_until(lambda: session.usage().running + session.usage().waiting == 0)


def service_of(session, **options):
    return App(session, **options).service


async def refusal(service, request) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await service.parse(request)
    return caught.value


async def never():
    await asyncio.Event().wait()


def response_to(service, parsed, *, stream):
    formatter = CompletionFormatter("m", service.texts, logprobs=False)
    return GenerationResponse(service, parsed, formatter, stream=stream)


class Client:
    """A client that reads the first `patience` messages of the server, and no more."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.received: list[dict] = []

    async def send(self, message: dict) -> None:
        if len(self.received) == self.patience:
            await never()
        self.received.append(message)

    @property
    def starts(self) -> int:
        return sum(message["type"] == "http.response.start" for message in self.received)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("patience", [0, 1, 2])
async def test_the_deadline_holds_for_a_client_that_does_not_read(
    session, monkeypatch, stream, patience
):
    """The request ends, and the head of its response is sent at most once."""
    monkeypatch.setattr(streaming, "ERROR_SEND_SECONDS", 0.2)
    client = Client(patience)
    service = service_of(session, request_seconds=1.0)
    answer = response_to(service, await service.parse(REQUEST), stream=stream)
    await asyncio.wait_for(answer({"type": "http"}, never, client.send), 60)
    assert service.active_requests == 0
    assert client.starts <= 1


async def test_a_deadline_counts_from_the_arrival(session):
    client = Client(100)
    service = service_of(session, request_seconds=60.0)
    parsed = await service.parse(REQUEST)
    with pytest.raises(ApiError, match="took longer"):
        await service.parse(REQUEST, arrived=parsed.arrived - 100)
    late = replace(parsed, arrived=parsed.arrived - 100)
    await response_to(service, late, stream=False)({"type": "http"}, never, client.send)
    assert client.received[0]["status"] == 504
    assert json.loads(client.received[1]["body"])["error"]["code"] == "timeout"


@pytest.fixture
def released(session, monkeypatch):
    released, encode = threading.Event(), session.encode

    def encode_held(text: str) -> list[int]:
        if len(text) > 100:
            assert released.wait(60)
        return encode(text[:100])

    monkeypatch.setattr(session, "encode", encode_held)
    yield released
    released.set()


async def test_long_texts_do_not_hold_up_short_ones(session, released, monkeypatch):
    """Long texts are tokenized one after another, which leaves a thread for short ones."""
    service = service_of(session)
    monkeypatch.setattr(service, "_max_prompt_bytes", 1 << 30)
    long = REQUEST.model_copy(update={"prompt": "a" * (LONG_TEXT_BYTES + 1)})
    waiting = [asyncio.create_task(service.parse(long)) for _ in range(8)]
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(service.parse(REQUEST), 30)).prompt_tokens
    assert not any(task.done() for task in waiting)
    released.set()
    await asyncio.gather(*waiting)


async def test_a_long_text_that_ran_out_of_time_holds_one_thread_alone(
    session, released, monkeypatch
):
    service = service_of(session, request_seconds=0.2)
    monkeypatch.setattr(service, "_max_prompt_bytes", 1 << 30)
    long = REQUEST.model_copy(update={"prompt": "a" * (LONG_TEXT_BYTES + 1)})
    for _ in range(2):
        assert (await refusal(service, long)).status == 504
    assert (await service.run_in_thread(lambda: 7, 0)) == 7
    released.set()


async def test_prompts_have_places_in_the_queue_while_and_after_they_are_tokenized(
    session, released
):
    service = service_of(session, max_queue=2)
    places = session.backend.capabilities.slots + 2  # those of the queue and all slots
    tokenizing = asyncio.create_task(
        service.parse(REQUEST.model_copy(update={"prompt": ["a" * 200] * places}))
    )
    await asyncio.sleep(0)
    assert (await refusal(service, REQUEST)).code == "queue_full"
    released.set()
    with (await tokenizing).places, pytest.raises(ApiError):
        await service.parse(REQUEST)
    assert await service.parse(REQUEST)


async def test_all_sequences_of_a_request_begin_or_none(session):
    service = service_of(session, max_queue=1)
    prompts = ["a"] * (session.backend.capabilities.slots + 1)
    request = REQUEST.model_copy(update={"prompt": prompts})
    with session.reserve(1):
        error = await refusal(service, request)
    assert (error.status, error.code) == (429, "queue_full")
    assert "max_queue" not in error.message  # a client cannot change this option
    assert session.usage().waiting == service.active_requests == 0
    async with service.decode(await service.parse(request)) as choices:
        assert len(choices) == len(prompts)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_that_cannot_fit_is_not_tokenized(session, monkeypatch, chat):
    monkeypatch.setattr(session, "encode", lambda _: pytest.fail("tokenized"))
    monkeypatch.setattr(session, "encode_chat", lambda *_, **__: pytest.fail("tokenized"))
    longest = max(map(len, session.tokenizer.get_vocab()))
    text = "a" * (longest * session.backend.capabilities.max_capacity + 1)
    content = [{"type": "text", "text": part} for part in (text[:1000], text[1000:])]
    chat_request = ChatRequest(model="m", messages=[{"role": "user", "content": content}])
    request = chat_request if chat else CompletionRequest(model="m", prompt=["a", text])
    error = await refusal(service_of(session), request)
    assert (error.code, error.param) == (
        "context_length_exceeded",
        "messages" if chat else "prompt",
    )


def test_a_context_full_of_the_longest_token_is_not_refused(session):
    texts = [session.tokenizer.decode([token]) for token in session.tokenizer.get_vocab().values()]
    valid = [text for text in texts if "\ufffd" not in text]  # not a part of a character
    text = max(valid, key=lambda text: len(text.encode()))
    service = service_of(session)
    request = CompletionRequest(model="m", prompt=text * session.backend.capabilities.max_capacity)
    assert prompt_bytes(request) <= service._max_prompt_bytes


@pytest.fixture
def may_compile(monkeypatch):
    """Return an event: constraints are compiled while it is set, as it is at first."""
    may_compile, call = threading.Event(), Child.call
    may_compile.set()
    monkeypatch.setattr(Child, "call", lambda *args: may_compile.wait(60) and call(*args))
    return may_compile


def with_regex(regex):
    return REQUEST.model_copy(update={"guided_regex": regex})


async def test_requests_wait_only_for_their_own_constraints(session, may_compile):
    """Those without a constraint, or whose constraint is compiled already, do not wait."""
    compiled = with_regex("compiled")
    service = service_of(session)
    await service.parse(compiled)
    may_compile.clear()
    held = [with_regex(f"held{i}") for i in range(6)]
    waiting = [asyncio.create_task(service.parse(request)) for request in held]
    same = [asyncio.create_task(service.parse(held[0])) for _ in range(3)]
    for _ in range(20):
        assert (await service.parse(REQUEST)).prompt_tokens
        assert (await service.parse(compiled)).constraint_kind == "regex"
    assert not any(task.done() for task in (*waiting, *same))
    waiting.pop().cancel()
    may_compile.set()
    for parsed in await asyncio.gather(*waiting, *same):
        assert parsed.constraint_kind == "regex"


async def test_a_request_times_out_while_another_waits_for_the_same_constraint(
    session, may_compile
):
    request = with_regex("late")
    may_compile.clear()
    hasty = service_of(session, request_seconds=0.2)
    patient = service_of(session)
    waiting = asyncio.create_task(patient.parse(request))
    assert (await refusal(hasty, request)).status == 504
    may_compile.set()
    assert (await waiting).constraint_kind == "regex"
