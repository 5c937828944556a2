"""HTTP as clients speak it, byte for byte: version 1.0, offers to upgrade, whole URLs as request
targets, and several requests on a connection."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from urllib.parse import urlsplit

import pytest

H2C = (
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
"""What every HTTP client of the JDK sends with its first request."""
WEBSOCKET = (
    "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@contextmanager
def connected(server) -> Iterator[socket.socket]:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as client:
        yield client


def completion(server, *headers: str, version: str = "1.1", target: str = "", **fields) -> bytes:
    body = {"model": server.model, "prompt": "The quick", "temperature": 0, "max_tokens": 4}
    content = json.dumps(body | fields).encode()
    head = f"POST {target or '/v1/completions'} HTTP/{version}\r\nHost: example.org\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return (head + "".join(headers) + "\r\n").encode() + content


def get(target: str, *headers: str, version: str = "1.1", method: str = "GET") -> bytes:
    head = f"{method} {target} HTTP/{version}\r\nHost: example.org\r\n" + "".join(headers)
    return f"{head}\r\n".encode()


def read_all(client: socket.socket) -> tuple[str, bytes]:
    head, _, body = b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    return head.decode().lower(), body


def answer(client: socket.socket, method: str = "POST") -> HTTPResponse:
    response = HTTPResponse(client, method=method)
    response.begin()
    response.body = response.read()
    return response


def text_of(content: bytes) -> str:
    return json.loads(content)["choices"][0]["text"]


def text_of_events(content: bytes) -> str:
    lines = content.decode().splitlines()
    *events, done = [line.removeprefix("data: ") for line in lines if line]
    assert done == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.fixture(scope="module")
def text(server) -> str:
    return text_of(server.complete(max_tokens=4).content)


@pytest.mark.parametrize("header", ["", "Connection: keep-alive\r\n"])
def test_an_answer_to_http_1_0_ends_its_connection(server, text, header):
    for stream in (False, True):
        with connected(server) as client:
            client.sendall(completion(server, header, version="1.0", stream=stream))
            head, body = read_all(client)
        assert " 200 " in head.splitlines()[0]
        assert "connection: close" in head and "transfer-encoding" not in head
        assert (f"content-length: {len(body)}" in head) == (not stream)
        if stream:
            assert text_of_events(body) == text
        else:
            assert text_of(body) == text


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_offer_to_upgrade_is_declined(server, text, offer, stream):
    """The request is answered with its body, and so is the next one on the connection."""
    before = len(server.log_text)
    with connected(server) as client:
        for headers in ((offer,), (), (offer,)):
            client.sendall(completion(server, *headers, stream=stream))
            response = answer(client)
            assert response.status == 200 and response.getheader("upgrade") is None
            if stream:
                assert response.getheader("transfer-encoding") == "chunked"
                assert text_of_events(response.body) == text
            else:
                assert text_of(response.body) == text
        client.sendall(get("/v1/models", offer))
        assert json.loads(answer(client, "GET").body)["data"][0]["id"] == server.model
    assert "upgrade" not in server.log_text[before:].lower()


@pytest.mark.parametrize("host", ["http://example.org", "HTTP://10.0.0.1:8000", "https://a.b"])
def test_a_whole_url_is_a_request_target(server, text, host):
    """As proxies send it (RFC 9112 3.2.2)."""
    before = len(server.log_text)
    with connected(server) as client:
        client.sendall(completion(server, target=f"{host}/v1/completions"))
        assert text_of(answer(client).body) == text
        client.sendall(get(f"{host}/v1/models/?a=b"))
        assert json.loads(answer(client, "GET").body)["data"][0]["id"] == server.model
        client.sendall(get(host))
        assert b"<html" in answer(client, "GET").body
        client.sendall(get(f"{host}/v1/http://x", "Connection: close\r\n"))
        assert answer(client, "GET").status == 404
    assert "GET /v1/models 200" in server.log_text[before:]


@pytest.mark.parametrize("target", ["*", "example.org:443", "ftp://example.org/v1/models"])
def test_other_targets_are_no_paths_of_the_server(server, target):
    for method in ("OPTIONS", "CONNECT", "GET"):
        with connected(server) as client:
            client.sendall(get(target, "Connection: close\r\n", method=method))
            head, _ = read_all(client)
            assert head.split()[1] in ("400", "404", "405"), (method, head)
