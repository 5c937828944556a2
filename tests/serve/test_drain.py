"""After SIGTERM a server refuses new requests, ends the running ones in time, and exits with 0."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from changed_pass_run import slow_pass_run
from running import Server, expect_error

STREAM = {"prompt": "a", "stream": True, "plan": "ar", "ignore_eos": True, "temperature": 0}


def begin(client, server, **fields):
    """Begin a stream, and return an iterator of the lines after the first one."""
    body = STREAM | {"model": server.model} | fields
    request = client.build_request("POST", f"{server.url}/v1/completions", json=body)
    lines = client.send(request, stream=True).iter_lines()
    next(lines)
    return lines


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
        lines = begin(client, server, max_tokens=80)
        server.terminate()
        wait_until_draining(server)
        refused = server.complete()
        assert expect_error(refused, 503)["code"] == "shutting_down"
        assert "Retry-After" in refused.headers
        assert httpx.get(f"{server.url}/health").status_code == 200
        *chunks, done = events(lines)
        assert done == "[DONE]"
        assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
        assert server.exit_status() == 0


@pytest.mark.slow
@pytest.mark.parametrize("second_signal", [False, True])
def test_answers_get_an_error_after_drain_seconds_or_at_a_second_signal(
    random_bundle, tmp_path, second_signal
):
    flags = ("--drain-seconds", 60 if second_signal else 0.5)
    with (
        Server(random_bundle, tmp_path / "log", *flags, command=slow_pass_run(0.05)) as server,
        httpx.Client(timeout=60) as client,
    ):
        lines = begin(client, server, max_tokens=600)
        server.terminate()
        if second_signal:
            wait_until_draining(server)
            server.terminate()
        *_, last, done = events(lines)
        assert done == "[DONE]"
        assert json.loads(last)["error"]["code"] == "shutting_down"
        assert server.exit_status() == 0
