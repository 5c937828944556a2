"""Many clients send requests at once, and some disconnect: all texts are right, all slots are free
in the end, and memory does not grow."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from metered import disconnects_early, mixed_requests, written
from process_memory import anonymous_bytes

CLIENTS, REQUESTS = 16, 20
MAX_GROWTH = 8 << 20
"""Bytes by which the server may grow in a round, 50 kB for each request; 1 MB is usual. A leak lets
it grow in every round, an allocator's reserve only in some."""
PLANS = ("ar", "two-pass", "fused", "auto")


def requests_of(client: int) -> list[dict]:
    return mixed_requests(client, REQUESTS, "prompt", PLANS)


def send(client: httpx.Client, server, number: int, request: dict) -> str | None:
    body = request | {"model": server.model}
    if disconnects_early(number):
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
        return None
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not request["stream"]:
        return response.json()["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.mark.slow
def test_sixteen_clients_get_the_texts_of_a_session_and_leave_nothing_behind(server, session):
    before = server.metric("vllm:request_success_total")
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")

    def send_some(client: int, numbers: range) -> list[str | None]:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            return [send(http, server, number, requests_of(client)[number]) for number in numbers]

    def all_send(numbers: range) -> list[list[str | None]]:
        texts = list(pool.map(lambda client: send_some(client, numbers), range(CLIENTS)))
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            server.wait_until(f"vllm:{name}", 0)
        return texts

    growths: list[int] = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        first_texts = all_send(range(REQUESTS // 2))
        while len(growths) < 4 and min(growths, default=MAX_GROWTH) >= MAX_GROWTH:
            bytes_before = anonymous_bytes(server.process.pid)
            last_texts = all_send(range(REQUESTS // 2, REQUESTS))
            growths.append(anonymous_bytes(server.process.pid) - bytes_before)
    assert min(growths) < MAX_GROWTH
    assert server.metric("vllm:request_success_total", finished_reason="abort") > aborted
    count = CLIENTS * REQUESTS // 2 * (1 + len(growths))
    assert server.metric("vllm:request_success_total") - before == count
    disconnected = 0
    for client, texts in enumerate(map(list.__add__, first_texts, last_texts)):
        for request, text in zip(requests_of(client), texts, strict=True):
            if text is None:
                disconnected += 1
                continue
            fields = request | {"plan": "ar"}
            del fields["stream"]
            assert text == written(session, **fields).text, request
    assert disconnected == CLIENTS * REQUESTS // 5
