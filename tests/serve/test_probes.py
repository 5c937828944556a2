"""What probes, proxies and browsers need: HEAD, OPTIONS, CORS, slashes at the end of paths,
compressed bodies, early heads and keep-alive comments of streams, answers while warming up."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from typing import Any

import pytest
import zstandard
from in_process import App
from running import expect_error
from starlette.testclient import TestClient

from pass_runtime import GenerateOptions, PassError
from pass_server import streaming
from pass_server.app import Entry
from pass_server.middleware import expand
from pass_server.serve_options import ServeOptions
from pass_server.service import Service

GET = ("/health", "/ready", "/metrics", "/v1/models", "/v1/models/m", "/", "/openapi.json")
POST = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
COMPLETION = {"model": "m", "prompt": "The quick", "max_tokens": 2, "temperature": 0}
ORIGIN = "https://chat.example.org"


@pytest.fixture
def http(session):
    with App(session).http as http:
        yield http


@pytest.fixture
def keyed(session):
    with App(session, cors_origins=(ORIGIN,), keys=("k",)).http as http:
        yield http


@pytest.mark.parametrize("path", GET)
def test_head_is_get_without_the_body(http, path):
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert head.headers.keys() == whole.headers.keys()
    assert http.head("/v1/models/other").status_code == 404
    assert http.head("/v1/completions").status_code == 405


@pytest.mark.parametrize("path", [*GET, *POST])
def test_options_lists_the_allowed_methods(http, keyed, path):
    for answer in (http.options(path), keyed.options(path)):
        allowed = answer.headers["allow"].split(", ")
        assert answer.status_code == 204
        assert {"OPTIONS", "POST" if path in POST else "GET"} <= set(allowed)
        assert ("HEAD" in allowed) == ("GET" in allowed)


def test_a_stream_has_no_headers_of_an_earlier_one(keyed):
    for origin in ({"Origin": ORIGIN}, {}, {"Origin": ORIGIN}):
        headers = {"Authorization": "Bearer k"} | origin
        answer = keyed.post("/v1/completions", json=COMPLETION | {"stream": True}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers.get("access-control-allow-origin") == origin.get("Origin")
        assert answer.headers.get("vary", "").count("Origin") <= 1


def test_other_origins_need_the_option_cors_origins(http, keyed):
    headers = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    headers |= {"Access-Control-Request-Headers": "authorization"}
    assert "access-control" not in str(http.get("/health", headers=headers).headers)
    preflight = keyed.options("/v1/completions", headers=headers)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    refused = keyed.post("/v1/completions", json=COMPLETION, headers={"Origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    headers["Origin"] = "https://evil.example"
    foreign = keyed.options("/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize(
    "options",
    [
        {"keep_alive_seconds": 0},
        *({"cors_origins": (wrong,)} for wrong in ("chat.example.org", "https://a/b", "")),
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(PassError, match=next(iter(options)).replace("_", "-").rstrip("s")):
        ServeOptions(**options)


@pytest.mark.parametrize("path", [*GET, *POST])
@pytest.mark.parametrize("slashes", ["/", "//"])
def test_a_slash_at_the_end_changes_nothing(http, keyed, path, slashes):
    headers = {"X-Forwarded-Proto": "https", "Host": "llm.example.org"}
    method = "POST" if path in POST else "GET"
    body = COMPLETION if path == "/v1/completions" else {} if method == "POST" else None
    paths = (path, path.rstrip("/") + slashes)
    without, answer = (http.request(method, each, json=body, headers=headers) for each in paths)
    assert without.status_code == answer.status_code != 404
    assert "location" not in answer.headers
    if path not in ("/metrics", "/v1/completions", "/v1/responses"):  # with ids or times
        assert without.content == answer.content
    needs_key = path in POST or path.startswith("/v1")
    assert {keyed.request(method, each).status_code == 401 for each in paths} == {needs_key}


BODY = json.dumps(COMPLETION).encode()
ENCODED_BODIES = {
    "gzip": gzip.compress(BODY),
    "x-gzip": gzip.compress(BODY),
    "GZip": gzip.compress(BODY[:9]) + gzip.compress(BODY[9:]),
    "zstd": zstandard.compress(BODY),
    "identity": BODY,
    "": BODY,
}
"""BODY in each accepted Content-Encoding."""


def send(http, body, encoding):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return http.post("/v1/completions", content=body, headers=headers)


@pytest.mark.parametrize("encoding", ENCODED_BODIES)
def test_compressed_bodies_are_expanded(http, encoding):
    plain = http.post("/v1/completions", json=COMPLETION).json()["choices"][0]["text"]
    answer = send(http, ENCODED_BODIES[encoding], encoding)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == plain


@pytest.mark.parametrize("encoding", ["deflate", "br", "gzip, gzip", "compress", "nonsense"])
def test_other_content_encodings_are_refused(http, encoding):
    problem = expect_error(send(http, zlib.compress(BODY), encoding), 415)
    assert f"Content-Encoding '{encoding}'" in problem["message"]


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_bodies_are_bounded_after_expansion(session, encoding):
    compress = {"gzip": gzip.compress, "zstd": zstandard.compress}[encoding]
    with App(session, max_body_bytes=10_000).http as http:
        problem = expect_error(send(http, compress(b" " * (1 << 26)), encoding), 413)
        assert problem["code"] == "body_too_large"
        assert send(http, compress(BODY.ljust(10_000)), encoding).status_code == 200
        assert send(http, compress(BODY.ljust(10_001)), encoding).status_code == 413
        for damaged in (compress(BODY)[:-9], b"junk", BODY):
            problem = expect_error(send(http, damaged, encoding), 400)
            assert problem["code"] in ("invalid_encoding", "invalid_json")
    assert expand(compress(b"a" * 5), encoding, 5) == b"aaaaa"


def test_a_body_is_utf8_with_or_without_a_byte_order_mark(http):
    assert send(http, BODY.decode().encode("utf-8-sig"), "").status_code == 200
    for name in ("utf-16", "utf-16-le", "utf-32-be"):
        problem = expect_error(send(http, BODY.decode().encode(name), ""), 400)
        assert name[:6].upper() in problem["message"]
    latin = BODY.replace(b"quick", "caf\u00e9".encode("latin-1"))
    assert "UTF-8" in expect_error(send(http, latin, ""), 400)["message"]


STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def stream_request(path: str) -> tuple[Any, Any]:
    """Return the ASGI scope of a request for a stream, and its `receive`, which gives the body, and
    then waits for ever, as for a client that stays connected."""
    fields: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0}
    fields |= {"input": "a", "max_output_tokens": 2} if "responses" in path else {"max_tokens": 2}
    fields |= {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
    fields |= {"prompt": "a"} if path == "/v1/completions" else {}
    messages = [{"type": "http.request", "body": json.dumps(fields).encode()}]

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": [(b"content-type", b"application/json")]}
    return scope | {"http_version": "1.1", "scheme": "http"}, receive


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_without_tokens_has_keep_alive_comments(session, monkeypatch, path):
    """The comments follow the head of the response, which comes before the first token."""
    release = asyncio.Event()
    pieces = Service.pieces

    async def held_pieces(self, choices):
        await release.wait()
        async for piece in pieces(self, choices):
            yield piece

    monkeypatch.setattr(Service, "pieces", held_pieces)
    app = App(session, keep_alive_seconds=0.05).app
    sent = asyncio.Queue()

    async def main() -> bytes:
        task = asyncio.create_task(app(*stream_request(path), sent.put))
        assert (await sent.get())["status"] == 200
        comments = 0
        while comments < 3:
            comments += (await sent.get())["body"] == b": keep-alive\n\n"
        release.set()
        await task
        return b"".join(sent.get_nowait().get("body", b"") for _ in range(sent.qsize()))

    rest = asyncio.run(main())
    assert b"data: " in rest
    assert b"error" not in rest.replace(b'"error":null', b"")


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_waits_for_a_slot_gets_its_head_at_once(session, monkeypatch, path):
    """The head waits HEAD_SECONDS for the first pass only if the stream has a slot. A client that
    disconnects frees its place in the queue."""
    monkeypatch.setattr(streaming, "HEAD_SECONDS", 3600.0)
    app, sent = App(session).app, asyncio.Queue()
    release = threading.Event()
    # Holds the thread that decodes, so that the requests keep all slots.
    holder = threading.Thread(target=session.call, args=(lambda _: release.wait(60),))
    holder.start()
    options = GenerateOptions(max_new_tokens=1, ignore_eos=True)
    occupied = [session.generate("a", options) for _ in range(session.slots)]

    async def main() -> None:
        task = asyncio.create_task(app(*stream_request(path), sent.put))
        assert (await asyncio.wait_for(sent.get(), 30))["status"] == 200
        task.cancel()
        await asyncio.wait({task})
        assert app.state.service.active_requests == 0

    try:
        asyncio.run(main())
    finally:
        release.set()
        holder.join()
    assert [each.result().finish_reason for each in occupied] == ["length"] * session.slots


def test_a_stream_that_fails_after_its_head_ends_with_an_error(session, monkeypatch):
    async def pieces(_self, _choices):
        await asyncio.sleep(0.2)
        raise PassError("it broke")
        yield  # makes the function a generator

    monkeypatch.setattr(Service, "pieces", pieces)
    monkeypatch.setattr(streaming, "HEAD_SECONDS", 0.01)
    with App(session).http as http:
        text = http.post("/v1/completions", json=COMPLETION | {"stream": True}).text
        lines = [line for line in text.splitlines() if line]
        assert json.loads(lines[0].removeprefix("data: "))["error"]["message"] == "it broke"
        assert lines[-1] == "data: [DONE]"
        events = http.post("/v1/responses", json={"model": "m", "input": "a", "stream": True}).text
        assert events.index("response.created") < events.index("response.failed")


def test_a_server_that_warms_up_is_healthy_and_not_ready(session):
    entry = Entry()
    http = TestClient(entry)
    assert http.get("/health").json() == {"status": "ok"}
    assert http.head("/health/").status_code == 200
    for path in ("/ready", "/v1/models", "/metrics"):
        answer = http.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    refused = http.post("/v1/completions", json=COMPLETION)
    assert expect_error(refused, 503)["code"] == "warming_up"
    entry.app = App(session).app
    assert http.get("/ready").status_code == 200
