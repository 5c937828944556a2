"""Connections that send no request or read no answer are closed, and make room for others."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
from changed_pass_run import slow_pass_run
from running import Server, expect_error

from pass_server.middleware import Admission
from pass_server.server import MIN_READ_BYTES, HttpServer, bounded_protocol, listen

CLIENT_SECONDS = 0.3
"""How long a client may take to send the head of a request, or to read a part of an answer."""
ANSWER = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}


async def slow_app(scope, receive, send) -> None:
    """Answer after longer than a client may take."""
    await asyncio.sleep(3 * CLIENT_SECONDS)
    await quick_app(scope, receive, send)


async def quick_app(_scope, _receive, send) -> None:
    await send(ANSWER)
    await send({"type": "http.response.body", "body": b"ok"})


async def large_app(_scope, _receive, send) -> None:
    """Answer with more bytes than the buffers of sockets hold."""
    await send({**ANSWER, "headers": []})
    for _ in range(1000):
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
    await send({"type": "http.response.body"})


@asynccontextmanager
async def serving(app, max_connections: int = 10, seconds: float = CLIENT_SECONDS):
    """Serve an app, and give the server and its port."""
    with listen("127.0.0.1", 0) as listening:
        server = HttpServer(app, max_connections, seconds)
        task = asyncio.create_task(server.serve([listening]))
        try:
            yield server, listening.getsockname()[1]
        finally:
            server.should_exit = True
            await task


def answer_to(app, sent: bytes) -> bytes:
    """Send these bytes, and return what the server of an app answers until it disconnects."""

    async def main() -> bytes:
        async with serving(app) as (_, port):
            reader, writer = await connect(port)
            writer.write(sent)
            try:
                return await asyncio.wait_for(reader.read(), 10)
            finally:
                writer.close()

    return asyncio.run(main())


def connect(port: int):
    return asyncio.open_connection("127.0.0.1", port)


async def no_connections(server: HttpServer) -> None:
    async with asyncio.timeout(20):
        while server.server_state.connections:
            await asyncio.sleep(0.02)


HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
"""Most of a request's head: the empty line at its end is missing."""
CLOSING_HEAD = HEAD + b"Connection: close\r\n"
KEYED_REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ours\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "answered"),
    [(b"", False), (CLOSING_HEAD, False), (CLOSING_HEAD + b"\r\n", True)],
    ids=["nothing", "half a head", "whole head"],
)
def test_a_head_has_to_come_in_time(sent, answered):
    received = answer_to(slow_app, sent)
    assert received.endswith(b"ok") if answered else received == b""


@pytest.mark.parametrize("second", [b"", HEAD], ids=["idle", "half a head"])
def test_the_next_head_has_to_come_in_time(second):
    async def main() -> None:
        async with serving(quick_app) as (_, port):
            reader, writer = await connect(port)
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            writer.write(second)
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()

    asyncio.run(main())


def test_requests_that_a_client_sends_before_it_has_an_answer_are_dropped():
    assert answer_to(quick_app, (HEAD + b"\r\n") * 1000).count(b"200 OK") == 1


@pytest.mark.slow
@pytest.mark.parametrize("app", [large_app, slow_app])
def test_a_client_that_does_not_read_is_disconnected(app):
    """The task of its request is ended, too."""

    async def main() -> None:
        begun = asyncio.Event()

        async def app_with_event(scope, receive, send) -> None:
            begun.set()
            await app(scope, receive, send)

        async with serving(app_with_event) as (server, port):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(HEAD + b"\r\n")
                await asyncio.wait_for(begun.wait(), 20)
                await no_connections(server)
                assert not server.server_state.tasks

    asyncio.run(main())


class Unread:
    """The transport of a client that has yet to read `unsent` bytes."""

    unsent, aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("read_bytes", "ended"), [(MIN_READ_BYTES, False), (100, True), (0, True)])
def test_a_client_that_reads_too_slowly_is_disconnected(read_bytes, ended):
    """It reads `read_bytes` every 10 seconds, and must read MIN_READ_BYTES every 20 seconds."""
    connection = object.__new__(bounded_protocol(10, 20.0))
    connection.transport, connection.flow = Unread(), SimpleNamespace(write_paused=True)
    connection.cycle = SimpleNamespace(response_complete=False)
    connection.read_at = connection.idle_since = connection.unsent = 0
    for seconds in range(0, 200, 10):
        connection.transport.unsent = 10_000_000 - read_bytes * seconds // 10
        connection.close_if_overdue(seconds)
    assert connection.transport.aborted == ended


def test_the_connection_that_is_idle_for_longest_makes_room():
    async def main() -> None:
        async with serving(quick_app, 3, seconds=60) as (server, port):
            idle = [await connect(port) for _ in range(3)]
            while len(server.server_state.connections) < 3:
                await asyncio.sleep(0.01)
            reader, writer = await connect(port)
            writer.write(CLOSING_HEAD + b"\r\n")
            assert (await reader.read()).endswith(b"ok")
            assert await asyncio.wait_for(idle[0][0].read(), 10) == b""
            for _, each in (*idle, (reader, writer)):
                each.close()

    asyncio.run(main())


@pytest.mark.parametrize("busy", [True, False], ids=["requests under way", "all idle"])
def test_clients_without_a_key_displace_no_client_with_a_key(busy):
    release = asyncio.Event()

    async def app(scope, receive, send) -> None:
        if busy and scope["path"] == "/v1/completions":
            await release.wait()
        await quick_app(scope, receive, send)

    async def ask(connection, sent: bytes) -> bytes:
        connection[1].write(sent)
        return await asyncio.wait_for(connection[0].readuntil(b"ok"), 20)

    async def main() -> None:
        async with serving(Admission(app, ("ours",)), 3, seconds=60) as (server, port):
            keyed = [await connect(port) for _ in range(3)]
            for each in keyed:
                await ask(each, KEYED_REQUEST)
            request = KEYED_REQUEST.replace(b"GET /v1/models", b"POST /v1/completions")
            waiting = [asyncio.create_task(ask(each, request)) for each in keyed[1:]]
            others = []
            for _ in range(5):
                others.append(await connect(port))
                await asyncio.sleep(0.05)  # until the server has accepted the connection
                assert b"200 OK" in await ask(keyed[0], KEYED_REQUEST)
            assert len(server.server_state.connections) <= 4
            release.set()
            assert all(b"200 OK" in answer for answer in await asyncio.gather(*waiting))
            for _, writer in (*keyed, *others):
                writer.close()

    asyncio.run(main())


def test_a_new_client_with_a_key_displaces_an_idle_client_with_a_key():
    async def main() -> None:
        async with serving(Admission(quick_app, ("ours",)), 2, seconds=60) as (_, port):
            earlier = [await connect(port) for _ in range(2)]
            for reader, writer in earlier:
                writer.write(KEYED_REQUEST)
                await reader.readuntil(b"ok")
            reader, writer = await connect(port)
            writer.write(KEYED_REQUEST)
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"ok"), 20)
            assert await asyncio.wait_for(earlier[0][0].read(), 20) == b""  # idle for longest
            for _, each in (*earlier, (reader, writer)):
                each.close()

    asyncio.run(main())


def test_accepted_sockets_have_tcp_nodelay():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.slow
def test_beyond_max_connections_only_probes_are_answered(random_bundle, tmp_path):
    """Connections with running requests are not closed to make room. Probes are answered, because
    an orchestrator restarts a server whose probes fail."""
    command = slow_pass_run(0.05)
    with Server(random_bundle, tmp_path / "log", "--max-connections", 2, command=command) as server:
        body = {"model": server.model, "prompt": "a", "max_tokens": 700}
        body |= {"stream": True, "ignore_eos": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body), httpx.stream("POST", url, json=body):
            refused = server.complete()
            assert expect_error(refused, 503)["code"] == "too_many_connections"
            assert {"retry-after": "1", "connection": "close"}.items() <= refused.headers.items()
            for probe in ("health", "ready", "metrics"):
                assert httpx.get(f"{server.url}/{probe}").status_code == 200
        deadline = time.monotonic() + 10
        while (status := server.complete().status_code) == 503 and time.monotonic() < deadline:
            time.sleep(0.05)  # until the server sees that the two streams are closed
        assert status == 200
