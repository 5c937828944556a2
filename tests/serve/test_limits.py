"""How much a server takes, from whom, and what it forgets when a client goes away."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import openai
import pytest
from changed_pass_run import slow_pass_run
from running import Server, error

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@pytest.fixture(scope="module")
def strict(random_bundle, tmp_path_factory):
    """With keys, and tight limits."""
    directory = tmp_path_factory.mktemp("strict")
    keys = directory / "keys"
    keys.write_text("# ours\nfirst-key\n\nsecond-key\n")
    limits = (
        "--max-prompt-tokens",
        20,
        "--max-output-tokens",
        30,
        "--max-body-bytes",
        2000,
        "--request-seconds",
        0.6,
    )
    arguments = (
        "--api-key-file",
        keys,
        "--served-model-name",
        "mine",
        "--allow-special-tokens",
        *limits,
    )
    with Server(
        random_bundle, directory / "log", *arguments, command=slow_pass_run(0.05)
    ) as running:
        yield running


def keyed(server, key="first-key", **fields):
    body = {
        "model": "mine",
        "prompt": "a",
        "temperature": 0,
        "plan": "ar",
        "ignore_eos": True,
    } | fields
    return server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})


def test_keys(strict):
    for value in (None, "Bearer other", "first-key", "Bearer", "Basic first-key"):
        headers = {} if value is None else {"Authorization": value}
        problem = error(strict.post("/v1/completions", {"model": "mine"}, headers=headers), 401)
        assert problem["code"] == "invalid_api_key"
        error(httpx.get(f"{strict.url}/v1/models", headers=headers), 401)
    for key in ("first-key", "second-key"):
        assert keyed(strict, key, max_tokens=1).status_code == 200
        assert strict.client(key).models.list().data[0].id == "mine"
    with pytest.raises(openai.AuthenticationError):
        strict.client("# ours").models.list()
    for path in ("health", "ready", "metrics"):
        assert httpx.get(f"{strict.url}/{path}").status_code == 200


def test_tokens_and_bytes(strict):
    assert error(keyed(strict, prompt=[5] * 21), 400)["code"] == "context_length_exceeded"
    assert error(keyed(strict, max_tokens=31), 400)["param"] == "max_tokens"
    assert error(keyed(strict, prompt="a" * 3000), 413)["code"] == "body_too_large"
    assert error(keyed(strict, n=100), 400)["param"] == "n"  # more than slots and queue hold


def test_special_tokens_in_messages_where_they_are_allowed(strict, session):
    messages = [{"role": "user", "content": "<eos>"}]
    ids = session.encode_chat(messages, allow_special_tokens=True)
    answer = strict.client("first-key").chat.completions.create(
        model="mine", messages=messages, max_tokens=1
    )
    assert answer.usage.prompt_tokens == len(ids) < len(session.encode_chat(messages))


def test_a_body_without_a_length(strict):
    parts = (b"x" * 500 for _ in range(100))
    headers = {"Authorization": "Bearer first-key", "Content-Type": "application/json"}
    error(httpx.post(f"{strict.url}/v1/completions", content=parts, headers=headers), 413)


def test_time(strict):
    assert error(keyed(strict, max_tokens=30), 504)["code"] == "timeout"
    strict.wait_until(RUNNING, 0)


def test_time_in_a_stream(strict):
    stream = strict.client("first-key").completions.create(
        model="mine",
        prompt="a",
        max_tokens=30,
        stream=True,
        extra_body={"plan": "ar", "ignore_eos": True},
    )
    pieces = []
    with pytest.raises(openai.APIError) as caught:
        pieces.extend(chunk for chunk in stream)
    assert pieces
    assert caught.value.code == "timeout"


def test_the_log_has_no_words_of_clients(strict):
    keyed(strict, prompt="a secret", max_tokens=1)
    keyed(strict, prompt="a secret", max_tokens="secret")
    keyed(strict, key="secret")
    assert "POST /v1/completions 200" in strict.said
    assert "POST /v1/completions 400" in strict.said
    assert "secret" not in strict.said
    assert "first-key" not in strict.said


def start(server, **fields):
    """A stream that has begun: `with start(...) as response`."""
    body = {
        "model": server.model,
        "prompt": "a",
        "max_tokens": 400,
        "stream": True,
        "plan": "ar",
        "ignore_eos": True,
    }
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body | fields, timeout=60)


def test_a_full_queue(slow_server):
    slow_server.wait_until(RUNNING, 0)
    with start(slow_server) as response:
        lines = response.iter_lines()
        next(lines)
        thread = threading.Thread(target=lambda: slow_server.complete(max_tokens=1))
        thread.start()
        slow_server.wait_until(WAITING, 1)
        refused = slow_server.complete(max_tokens=1)
        assert error(refused, 429)["type"] == "rate_limit_error"
        assert int(refused.headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            slow_server.client().completions.create(model=slow_server.model, prompt="a")
    thread.join()  # the slot is free for it
    assert slow_server.complete(max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(slow_server, stream):
    slow_server.wait_until(RUNNING, 0)
    aborted = slow_server.metric("vllm:request_success_total", finished_reason="abort")
    written = slow_server.metric("vllm:generation_tokens_total")
    body = {
        "model": slow_server.model,
        "prompt": "a",
        "max_tokens": 400,
        "plan": "ar",
        "ignore_eos": True,
    }
    content = json.dumps(body | {"stream": stream}).encode()
    with socket.create_connection(slow_server.url.removeprefix("http://").split(":")) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}"
        head += "\r\nContent-Type: application/json"
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        slow_server.wait_until(RUNNING, 1)
        time.sleep(0.3)
    slow_server.wait_until(RUNNING, 0)
    assert slow_server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    assert slow_server.metric("vllm:generation_tokens_total") - written < 100


def test_a_client_that_goes_away_while_it_waits(slow_server):
    slow_server.wait_until(RUNNING, 0)
    with start(slow_server) as response:
        lines = response.iter_lines()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{slow_server.url}/v1/completions",
                json={"model": slow_server.model, "prompt": "b"},
                timeout=0.3,
            )
        slow_server.wait_until(WAITING, 0, seconds=10)  # the other one takes 20 seconds at least
        assert slow_server.metric(RUNNING) == 1


def test_the_openai_client_can_stop(slow_server):
    slow_server.wait_until(RUNNING, 0)
    aborted = slow_server.metric("vllm:request_success_total", finished_reason="abort")
    stream = slow_server.client().completions.create(
        model=slow_server.model,
        prompt="a",
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    slow_server.wait_until(RUNNING, 0)
    assert slow_server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
