"""Connections that ask nothing do not keep others out."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
from changed_pass_run import slow_pass_run
from running import Server, error

from pass_server.middleware import Admission
from pass_server.server import MIN_READ_BYTES, HttpServer, bounded_protocol, listen

SECONDS = 0.3
"""For a head, between requests, and for a client that does not read."""
ANSWER = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}


async def slow_app(_scope, _receive, send) -> None:
    """Takes longer than a head may."""
    await asyncio.sleep(3 * SECONDS)
    await send(ANSWER)
    await send({"type": "http.response.body", "body": b"ok"})


async def quick_app(_scope, _receive, send) -> None:
    await send(ANSWER)
    await send({"type": "http.response.body", "body": b"ok"})


async def large_app(_scope, _receive, send) -> None:
    """More than buffers hold, in pieces."""
    await send({**ANSWER, "headers": []})
    for _ in range(1000):
        await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
    await send({"type": "http.response.body"})


@asynccontextmanager
async def serving(app, most: int = 10, seconds: float = SECONDS):
    """-> the server, and its port."""
    with listen("127.0.0.1", 0) as listening:
        server = HttpServer(app, most, seconds)
        task = asyncio.create_task(server.serve([listening]))
        try:
            yield server, listening.getsockname()[1]
        finally:
            server.should_exit = True
            await task


def answer_to(app, sent: bytes) -> bytes:
    """What comes until the server closes the connection."""

    async def main() -> bytes:
        async with serving(app) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            try:
                return await asyncio.wait_for(reader.read(), 10)
            finally:
                writer.close()

    return asyncio.run(main())


async def no_connections(server: HttpServer) -> None:
    async with asyncio.timeout(20):
        while server.server_state.connections:
            await asyncio.sleep(0.02)


HEAD = b"GET / HTTP/1.1\r\nHost: a\r\n"
LAST = HEAD + b"Connection: close\r\n"
KEYED = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ours\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answered"), [(b"", False), (LAST, False), (LAST + b"\r\n", True)]
)
def test_a_head_has_its_time(sent, answered):
    received = answer_to(slow_app, sent)
    assert received.endswith(b"ok") if answered else received == b""


@pytest.mark.parametrize("second", [b"", HEAD], ids=["idle", "half a head"])
def test_so_has_every_other_one(second):
    """The connection of a finished request is closed when the next one does not come, or not to its
    end."""

    async def main() -> None:
        async with serving(quick_app) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            writer.write(second)
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()

    asyncio.run(main())


def test_requests_do_not_come_before_the_answer_to_the_last_one():
    assert answer_to(quick_app, (HEAD + b"\r\n") * 1000).count(b"200 OK") == 1


@pytest.mark.parametrize("app", [large_app, slow_app])
def test_a_client_that_does_not_read(app):
    """It loses its connection, and the request its task."""

    async def main() -> None:
        begun = asyncio.Event()

        async def marked(scope, receive, send) -> None:
            begun.set()
            await app(scope, receive, send)

        async with serving(marked) as (server, port):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(HEAD + b"\r\n")
                await asyncio.wait_for(begun.wait(), 20)
                await no_connections(server)
                assert not server.server_state.tasks

    asyncio.run(main())


class Unread:
    """What a protocol sees of a client that has `unsent` bytes to read yet."""

    unsent, aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("bytes_each", "ended"), [(MIN_READ_BYTES, False), (100, True), (0, True)])
def test_a_client_that_reads_slowly_is_not_one_that_does_not_read(bytes_each, ended):
    connection = object.__new__(bounded_protocol(10, 20.0))
    connection.transport, connection.flow = Unread(), SimpleNamespace(write_paused=True)
    connection.cycle = SimpleNamespace(response_complete=False)
    connection.read_at = connection.idle_since = connection.unsent = 0
    for time_of_day in range(0, 200, 10):
        connection.transport.unsent = 10_000_000 - bytes_each * time_of_day // 10
        connection.close_if_overdue(time_of_day)
    assert connection.transport.aborted == ended


def test_whoever_asks_nothing_makes_room():
    """First whoever is idle for longest."""

    async def main() -> None:
        async with serving(quick_app, most=3, seconds=60) as (server, port):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            while len(server.server_state.connections) < 3:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(LAST + b"\r\n")
            assert (await reader.read()).endswith(b"ok")
            assert await asyncio.wait_for(idle[0][0].read(), 10) == b""
            for _, each in (*idle, (reader, writer)):
                each.close()

    asyncio.run(main())


@pytest.mark.parametrize("busy", [True, False], ids=["requests under way", "all idle"])
def test_who_has_shown_no_key_takes_no_place_from_those_who_have(busy):
    """Clients with a key keep their connections while others without one come, wait, and go."""
    release = asyncio.Event()

    async def app(scope, receive, send) -> None:
        if busy and scope["path"] == "/v1/completions":
            await release.wait()
        await quick_app(scope, receive, send)

    async def ask(connection, sent: bytes) -> bytes:
        connection[1].write(sent)
        return await asyncio.wait_for(connection[0].readuntil(b"ok"), 20)

    async def main() -> None:
        async with serving(Admission(app, ("ours",)), most=3, seconds=60) as (server, port):
            keyed = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for each in keyed:
                await ask(each, KEYED)
            waiting = [
                asyncio.create_task(
                    ask(each, KEYED.replace(b"GET /v1/models", b"POST /v1/completions"))
                )
                for each in keyed[1:]
            ]
            others = []
            for _ in range(5):
                others.append(await asyncio.open_connection("127.0.0.1", port))
                await asyncio.sleep(0.05)  # until the server has taken it
                assert b"200 OK" in await ask(keyed[0], KEYED)
            assert len(server.server_state.connections) <= 4
            release.set()
            assert all(b"200 OK" in answer for answer in await asyncio.gather(*waiting))
            for _, writer in (*keyed, *others):
                writer.close()

    asyncio.run(main())


def test_a_new_client_with_a_key_takes_the_place_of_one_that_is_idle():
    async def main() -> None:
        async with serving(Admission(quick_app, ("ours",)), most=2, seconds=60) as (_, port):
            before = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for reader, writer in before:
                writer.write(KEYED)
                await reader.readuntil(b"ok")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(KEYED)
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"ok"), 20)
            assert await asyncio.wait_for(before[0][0].read(), 20) == b""  # it was idle for longest
            for _, each in (*before, (reader, writer)):
                each.close()

    asyncio.run(main())


def test_tokens_do_not_wait_for_acknowledgements():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_more_connections_than_there_may_be(random_bundle, tmp_path):
    """Nobody makes room whose request is under way. Probes are answered all the same: who sees them
    fail restarts the server."""
    command = slow_pass_run(0.05)
    with Server(random_bundle, tmp_path / "log", "--max-connections", 2, command=command) as server:
        body = {
            "model": server.model,
            "prompt": "a",
            "max_tokens": 700,
            "stream": True,
            "ignore_eos": True,
        }
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body), httpx.stream("POST", url, json=body):
            refused = server.complete()
            assert error(refused, 503)["code"] == "too_many_connections"
            assert {"retry-after": "1", "connection": "close"}.items() <= refused.headers.items()
            for probe in ("health", "ready", "metrics"):
                assert httpx.get(f"{server.url}/{probe}").status_code == 200
        until = time.monotonic() + 10
        while (answered := server.complete().status_code) == 503 and time.monotonic() < until:
            time.sleep(0.05)  # it has yet to see that the two are gone
        assert answered == 200
