"""Connections that ask nothing do not keep others out."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest
from running import Server, error

from pass_runtime.serve.server import HttpServer, listen

HEAD_SECONDS = 0.3
ANSWER = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}


async def slow_app(_scope, _receive, send) -> None:
    """Takes longer than a head may."""
    await asyncio.sleep(3 * HEAD_SECONDS)
    await send(ANSWER)
    await send({"type": "http.response.body", "body": b"ok"})


async def answer_to(port: int, sent: bytes) -> bytes:
    """What comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


HEAD = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"


@pytest.mark.parametrize(("sent", "answered"), [(b"", False), (HEAD, False), (HEAD + b"\r\n", True)])
def test_a_head_has_its_time(sent, answered):
    async def main() -> bytes:
        with listen("127.0.0.1", 0) as listening:
            server = HttpServer(slow_app, 10, HEAD_SECONDS)
            serving = asyncio.create_task(server.serve([listening]))
            told = await answer_to(listening.getsockname()[1], sent)
            server.should_exit = True
            await serving
        return told

    told = asyncio.run(main())
    assert told.endswith(b"ok") if answered else told == b""


def test_tokens_do_not_wait_for_acknowledgements():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_more_connections_than_there_may_be(random_bundle, tmp_path):
    """Probes are answered all the same: who sees them fail restarts the server."""
    with Server(random_bundle, tmp_path / "log", "--max-connections", 2) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address), socket.create_connection(address):
            refused = server.complete()
            assert error(refused, 503)["code"] == "too_many_connections"
            assert {"retry-after": "1", "connection": "close"}.items() <= refused.headers.items()
            for probe in ("health", "ready", "metrics"):
                assert httpx.get(f"{server.url}/{probe}").status_code == 200
        until = time.monotonic() + 10
        while (answered := server.complete().status_code) == 503 and time.monotonic() < until:
            time.sleep(0.05)  # it has yet to see that the two are gone
        assert answered == 200
