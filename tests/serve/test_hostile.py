"""A server with API keys and many hostile connections answers clients with a key, and closes all
hostile connections."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import psutil
import pytest
from running import Server

CLIENT_SECONDS = 1.0
GET = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n"
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: "
    b"application/json\r\nContent-Length: 100000\r\n"
)
KEY = b"Authorization: Bearer ours\r\n"
HOSTILE_CLIENTS: dict[str, Callable[[socket.socket], object]] = {
    "nothing": lambda _: None,
    "half a head": lambda client: client.sendall(GET),
    "half a body": lambda client: client.sendall(POST + b'\r\n{"model":'),
    "half a body, with a key": lambda client: client.sendall(POST + KEY + b'\r\n{"model":'),
    "many requests, nothing read": lambda client: client.sendall((GET + b"\r\n") * 200),
    "idle": lambda client: (client.sendall(GET + b"\r\n"), client.recv(1)),
    "half a head after a request": lambda client: (
        client.sendall(GET + b"\r\n"),
        client.recv(1),
        client.sendall(GET),
    ),
}
"""What a hostile client does after it has connected."""
CLIENTS_OF_EACH_KIND = 30


@pytest.fixture(scope="module", params=[512, 50], ids=["room for all", "room for few"])
def keyed(request, random_bundle, tmp_path_factory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("hostile")
    (directory / "keys").write_text("ours\n")
    limits = ("--client-seconds", CLIENT_SECONDS, "--request-seconds", 20)
    flags = ("--api-key-file", directory / "keys", "--max-connections", request.param, *limits)
    with Server(random_bundle, directory / "log", *flags) as running:
        yield running


def complete(server: Server) -> httpx.Response:
    body = {"model": server.model, "prompt": "a", "max_tokens": 1}
    return server.post("/v1/completions", body, headers={"Authorization": "Bearer ours"})


def connection_count(server: Server) -> int:
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(connection.status != psutil.CONN_LISTEN for connection in connections)


@pytest.mark.slow
def test_hostile_connections_are_closed_and_clients_with_a_key_answered(keyed):
    """None of the hostile clients closes its end of a connection."""
    address = ("127.0.0.1", int(keyed.url.rpartition(":")[2]))
    with ExitStack() as stack:
        for number in range(CLIENTS_OF_EACH_KIND):
            for attack in HOSTILE_CLIENTS.values():
                client = stack.enter_context(socket.create_connection(address))
                try:
                    attack(client)
                except ConnectionError:  # the server has closed it to make room
                    continue
            if number % 5 == 0:
                assert complete(keyed).status_code == 200
        seconds = []  # of each request
        deadline = time.monotonic() + 60
        while connection_count(keyed) and time.monotonic() < deadline:
            begun = time.monotonic()
            assert complete(keyed).status_code == 200
            seconds.append(time.monotonic() - begun)
            time.sleep(0.1)  # until the server sees that this client has left
        assert connection_count(keyed) == 0
        assert min(seconds, default=0) < 1
    assert complete(keyed).status_code == 200
    assert "Traceback" not in keyed.log_text
