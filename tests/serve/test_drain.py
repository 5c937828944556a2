"""SIGTERM: new requests are refused, running ones finish or get an error; the exit status is 0."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from changed_pass_run import slow_pass_run
from running import Server, error

ASKED = {"prompt": "a", "stream": True, "plan": "ar", "ignore_eos": True, "temperature": 0}


def begin(client, server, **fields):
    """Begin a stream, and return an iterator of its lines, and a list with the first one."""
    body = ASKED | {"model": server.model} | fields
    request = client.build_request("POST", f"{server.url}/v1/completions", json=body)
    lines = client.send(request, stream=True).iter_lines()
    return lines, [next(lines)]


def wait_until_draining(server) -> None:
    for _ in range(200):
        if httpx.get(f"{server.url}/ready").status_code == 503:
            return
        time.sleep(0.02)
    raise AssertionError("it is still ready")


def events(lines) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line]


@pytest.mark.slow
def test_running_answers_are_finished(random_bundle, tmp_path):
    with (
        Server(random_bundle, tmp_path / "log", command=slow_pass_run(0.05)) as server,
        httpx.Client(timeout=60) as client,
    ):
        lines, read = begin(client, server, max_tokens=80)
        server.terminate()
        wait_until_draining(server)
        refused = server.complete()
        assert error(refused, 503)["code"] == "shutting_down"
        assert "Retry-After" in refused.headers
        assert httpx.get(f"{server.url}/health").status_code == 200
        *chunks, done = events([*read, *lines])
        assert done == "[DONE]"
        assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
        assert server.exit_status() == 0


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_answers_that_take_too_long_get_an_error(random_bundle, tmp_path, again):
    """After --drain-seconds, or at a second signal."""
    flags = ("--drain-seconds", 60 if again else 0.5)
    with (
        Server(random_bundle, tmp_path / "log", *flags, command=slow_pass_run(0.05)) as server,
        httpx.Client(timeout=60) as client,
    ):
        lines, read = begin(client, server, max_tokens=600)
        server.terminate()
        if again:
            wait_until_draining(server)
            server.terminate()
        *_, last, done = events([*read, *lines])
        assert done == "[DONE]"
        assert json.loads(last)["error"]["code"] == "shutting_down"
        assert server.exit_status() == 0
