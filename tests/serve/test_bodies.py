"""Bodies of requests that are costly to parse: they are refused at the first errors, with a short
message, and other requests do not wait for them."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import App
from pydantic import TypeAdapter

from pass_server import app
from pass_server.api_error import MAX_MESSAGE_CHARS, ApiError
from pass_server.app import MAX_JSON_NODES, parse_body
from pass_server.responses_input import ResponsesRequest
from pass_server.schemas import BoundedObject, ChatRequest, CompletionRequest
from pass_server.tokenizing import DetokenizeRequest, TokenizeRequest
from pass_server.triton.tensors import TritonRequest

REQUESTS = (
    *(CompletionRequest, ChatRequest, ResponsesRequest, TritonRequest),
    *(TokenizeRequest, DetokenizeRequest),
)
BODY_BYTES = 1_000_000


@pytest.mark.parametrize("model", REQUESTS)
def test_texts_lists_and_objects_of_a_request_are_bounded(model):
    """Lists end at their first error, and no union tries two types that can have many errors."""
    assert [*unbounded_parts(TypeAdapter(model).core_schema, model.__name__)] == []


def unbounded_parts(schema: object, path: str):
    if isinstance(schema, (list, tuple)):
        for i, part in enumerate(schema):
            yield from unbounded_parts(part, f"{path}.{i}")
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind == "list" and not (schema.get("fail_fast") and "max_length" in schema):
        yield f"{path}: a list without an end, or that does not end at an error"
    pattern = str(schema.get("pattern"))  # one like [a-z]{1,9}$ bounds the length, too
    if kind == "str" and "max_length" not in schema and "}$" not in pattern:
        yield f"{path}: a string without an end"
    if kind == "dict" and "max_length" not in schema:
        yield f"{path}: a dict without an end"
    if kind == "model" and not issubclass(schema["cls"], BoundedObject):
        yield f"{path}: an object with any number of fields"
    if kind == "union" and sum(not_scalar(choice) for choice in schema["choices"]) > 1:
        yield f"{path}: a union of several types, each of which is tried"
    for name, part in schema.items():
        if name not in ("metadata", "serialization"):
            yield from unbounded_parts(part, f"{path}.{name}")


def not_scalar(choice: object) -> bool:
    schema = choice[0] if isinstance(choice, tuple) else choice
    while "schema" in schema and schema["type"] != "model":
        schema = schema["schema"]
    return schema["type"] in ("list", "dict", "model", "tagged-union", "union", "definition-ref")


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
LONG_VALUES = st.sampled_from(
    ["x" * 5000, '"' * 5000, "\u20ac" * 5000, 10**4000, ["y" * 5000] * 3, {"z" * 5000: 1}]
)
VALUES = st.recursive(
    LEAVES | LONG_VALUES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), model=st.sampled_from(REQUESTS))
def test_error_messages_are_short_whatever_name_and_value_a_field_has(data, model):
    names = st.sampled_from([*model.model_fields, "n" * 5000])
    fields = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=4))
    sys.set_int_max_str_digits(5000)  # so that 10**4000 can be written; the default is 4300
    try:
        body = json.dumps({"model": "m", "prompt": "a"} | fields).encode()
    finally:
        sys.set_int_max_str_digits(4300)
    try:
        parse_body(model, body)
    except ApiError as error:
        assert len(error.message) <= MAX_MESSAGE_CHARS
        assert len(error.param or "") <= MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        (b"[" * BODY_BYTES, "objects, fields and lists"),
        (b'{"prompt":[' + b"[]," * (MAX_JSON_NODES + 1) + b"1]}", "objects, fields and lists"),
        (json.dumps(dict.fromkeys(range(MAX_JSON_NODES))).encode(), "objects, fields and lists"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "recursion limit"),
        (b'{"prompt":' + b"1" * BODY_BYTES + b"}", "out of range"),
        (b'{"prompt":NaN}', "not JSON"),
        (b'{"prompt":"' + b"\\\\" * 100_000, "not JSON"),
        (b'{"model":"m","prompt":"a","temperature":1e400}', "temperature"),
    ],
    ids=["[[[", "[],[],", "keys", "deep", "digits", "NaN", "half a string", "1e400"],
)
def test_costly_json_is_refused(body, refused):
    with pytest.raises(ApiError, match=refused):
        parse_body(CompletionRequest, body)


def test_brackets_in_texts_do_not_count_as_lists():
    text = '[{:\\"' * 2 * MAX_JSON_NODES
    request = parse_body(CompletionRequest, json.dumps({"model": "m", "prompt": text}).encode())
    assert request.prompt == text


LONG_TEXT = "a" * 40_000
LONG_BODIES = [
    ("/v1/completions", {"model": "m", "prompt": [5] * 20_000}),
    ("/v1/completions", {"model": "m", "prompt": ["a" * 1000] * 50}),
    ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": LONG_TEXT}]}),
    ("/v1/responses", {"model": "m", "input": LONG_TEXT}),
    ("/tokenize", {"prompt": LONG_TEXT}),
    ("/detokenize", {"tokens": [5] * 20_000}),
]


def test_short_requests_do_not_wait_until_long_ones_are_parsed(session, monkeypatch):
    release, held, statuses = threading.Event(), [], []
    parse = app.parse_body

    def hold_long_bodies(model, body):
        if len(body) > 1 << 15:
            held.append(threading.current_thread().name.rpartition("_")[0])
            release.wait(60)
        return parse(model, body)

    monkeypatch.setattr(app, "parse_body", hold_long_bodies)

    async def main() -> None:
        transport = httpx.ASGITransport(App(session).app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://a", timeout=60
        ) as client:
            waiting = [
                asyncio.create_task(client.post(path, json=each)) for path, each in LONG_BODIES
            ]
            for _ in LONG_BODIES:
                await asyncio.sleep(0)
                answer = await client.post("/tokenize", json={"prompt": "a" * 5000})
                statuses.append(answer.status_code)
            release.set()
            await asyncio.gather(*waiting)

    asyncio.run(main())
    assert statuses == [200] * len(LONG_BODIES)
    assert held == ["pass-reader"] * len(LONG_BODIES)


def test_tokenizing_a_long_text_releases_pythons_lock(session):
    wakeups, done = 0, threading.Event()

    def wake_up_often() -> None:
        nonlocal wakeups
        while not done.is_set():
            time.sleep(0.001)
            wakeups += 1

    thread = threading.Thread(target=wake_up_often)
    thread.start()
    begun = time.process_time()
    session.encode("a b " * 250_000)
    seconds = time.process_time() - begun
    done.set()
    thread.join()
    assert wakeups > 10 * seconds


def test_log_lines_of_long_methods_and_paths_are_short(server):
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    for head in (b"X" * 60_000 + b" /v1/models", b"GET /" + b"Y" * 60_000, b"Z" * 200_000):
        with socket.create_connection(address) as client:
            client.sendall(head + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            client.recv(1000)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert "OTHER /v1/models 405" in server.log_text  # OTHER is the unknown method of 60,000 bytes
    assert max(map(len, server.log_text.splitlines())) < 1000
