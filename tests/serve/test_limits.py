"""API keys, limits of requests, a full queue, and clients that disconnect."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import openai
import pytest
from changed_pass_run import slow_pass_run
from running import ENDLESS, Server, expect_error

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


@pytest.fixture(scope="module")
def strict(random_bundle, tmp_path_factory):
    """A server with API keys and tight limits; a pass takes 0.1 s."""
    directory = tmp_path_factory.mktemp("strict")
    keys = directory / "keys"
    keys.write_text("# ours\nfirst-key\n\nsecond-key\n")
    limits = ("--max-prompt-tokens", 20, "--max-output-tokens", 30, "--max-body-bytes", 2000)
    flags = ("--api-key-file", keys, "--served-model-name", "mine", "--allow-special-tokens")
    flags += (*limits, "--request-seconds", 2)
    log = directory / "log"
    with Server(random_bundle, log, *flags, command=slow_pass_run(0.1)) as running:
        yield running


def keyed(server, key="first-key", **fields):
    """Send a completion with a key."""
    body = {"model": "mine", "prompt": "a", "temperature": 0, "plan": "ar", "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    return server.post("/v1/completions", body | fields, headers=headers)


def test_the_api_needs_a_key_and_probes_need_none(strict):
    for value in (None, "Bearer other", "first-key", "Bearer", "Basic first-key"):
        headers = {} if value is None else {"Authorization": value}
        problem = expect_error(
            strict.post("/v1/completions", {"model": "mine"}, headers=headers), 401
        )
        assert problem["code"] == "invalid_api_key"
        expect_error(httpx.get(f"{strict.url}/v1/models", headers=headers), 401)
    for key in ("first-key", "second-key"):
        assert keyed(strict, key, max_tokens=1).status_code == 200
        assert strict.client(key).models.list().data[0].id == "mine"
    with pytest.raises(openai.AuthenticationError):
        strict.client("# ours").models.list()
    for path in ("health", "ready", "metrics"):
        assert httpx.get(f"{strict.url}/{path}").status_code == 200


def test_requests_beyond_the_limits_are_refused(strict):
    assert expect_error(keyed(strict, prompt=[5] * 21), 400)["code"] == "context_length_exceeded"
    assert expect_error(keyed(strict, max_tokens=31), 400)["param"] == "max_tokens"
    assert expect_error(keyed(strict, prompt="a" * 3000), 413)["code"] == "body_too_large"
    # More choices than the slots and the queue hold.
    assert expect_error(keyed(strict, n=100), 400)["param"] == "n"


def test_allow_special_tokens_makes_tokens_of_what_messages_spell(strict, session):
    messages = [{"role": "user", "content": "<eos>"}]
    ids = session.encode_chat(messages, allow_special_tokens=True)
    create = strict.client("first-key").chat.completions.create
    answer = create(model="mine", messages=messages, max_tokens=1)
    assert answer.usage.prompt_tokens == len(ids) < len(session.encode_chat(messages))


def test_a_body_without_a_length_is_refused_beyond_the_limit(strict):
    parts = (b"x" * 500 for _ in range(100))
    headers = {"Authorization": "Bearer first-key", "Content-Type": "application/json"}
    expect_error(httpx.post(f"{strict.url}/v1/completions", content=parts, headers=headers), 413)


def test_a_stream_that_takes_too_long_ends_with_an_error(strict):
    body = {"model": "mine", "prompt": "a", "max_tokens": 30, "stream": True}
    extra = {"plan": "ar", "ignore_eos": True}
    stream = strict.client("first-key").completions.create(**body, extra_body=extra)
    pieces = []
    with pytest.raises(openai.APIError) as caught:
        pieces.extend(stream)
    assert pieces
    assert caught.value.code == "timeout"


def test_the_log_has_no_text_of_clients(strict):
    keyed(strict, prompt="a secret", max_tokens=1)
    keyed(strict, prompt="a secret", max_tokens="secret")
    keyed(strict, key="secret")
    assert "POST /v1/completions 200" in strict.log_text
    assert "POST /v1/completions 400" in strict.log_text
    assert "secret" not in strict.log_text
    assert "first-key" not in strict.log_text


def test_requests_are_refused_while_the_queue_is_full(slow_server):
    slow_server.wait_until(RUNNING, 0)
    with slow_server.stream():
        thread = threading.Thread(target=lambda: slow_server.complete(max_tokens=1))
        thread.start()
        slow_server.wait_until(WAITING, 1)
        refused = slow_server.complete(max_tokens=1)
        assert expect_error(refused, 429)["type"] == "rate_limit_error"
        assert int(refused.headers["Retry-After"]) >= 1
        with pytest.raises(openai.RateLimitError):
            slow_server.client().completions.create(model=slow_server.model, prompt="a")
    thread.join()  # the request that waited gets the slot
    assert slow_server.complete(max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_slot(slow_server, stream):
    slow_server.wait_until(RUNNING, 0)
    aborted = slow_server.metric("vllm:request_success_total", finished_reason="abort")
    written = slow_server.metric("vllm:generation_tokens_total")
    content = json.dumps(ENDLESS | {"model": slow_server.model, "stream": stream}).encode()
    with socket.create_connection(slow_server.url.removeprefix("http://").split(":")) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}"
        head += "\r\nContent-Type: application/json"
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        slow_server.wait_until(RUNNING, 1)
        time.sleep(0.3)  # six passes
    slow_server.wait_until(RUNNING, 0)
    assert slow_server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    assert slow_server.metric("vllm:generation_tokens_total") - written < 100  # of 600


def test_a_client_that_disconnects_while_it_waits_leaves_the_queue(slow_server):
    body = {"model": slow_server.model, "prompt": "b"}
    slow_server.wait_until(RUNNING, 0)
    with slow_server.stream():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{slow_server.url}/v1/completions", json=body, timeout=0.3)
        slow_server.wait_until(WAITING, 0, seconds=10)  # the stream takes at least 20 s
        assert slow_server.metric(RUNNING) == 1
