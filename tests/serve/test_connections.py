"""Connections: their number, their end after an answer, and their packets."""

from __future__ import annotations

import socket

import httpx
import pytest
from changed_pass_run import slow_pass_run
from running import Server

from pass_server.server import listen


def test_accepted_sockets_have_tcp_nodelay():
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.slow
def test_a_connection_without_a_next_request_is_closed(server):
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in b"".join(iter(lambda: client.recv(1 << 16), b""))


@pytest.mark.slow
def test_requests_on_too_many_connections_get_status_503(random_bundle, tmp_path):
    command = slow_pass_run(0.05)
    with Server(random_bundle, tmp_path / "log", "--max-connections", 2, command=command) as server:
        body = {"model": server.model, "prompt": "a", "max_tokens": 700}
        body |= {"stream": True, "ignore_eos": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body):
            assert server.complete(max_tokens=1).status_code == 200
            with httpx.stream("POST", url, json=body):
                assert server.complete(max_tokens=1).status_code == 503
