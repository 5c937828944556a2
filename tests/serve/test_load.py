"""Many clients at once, some of which disconnect: all texts are right, all slots are free in the
end, and memory does not grow."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from metered import given_up, mixed_requests
from process_memory import anonymous_bytes

from pass_runtime import GenerateOptions, SamplingParams

CLIENTS, REQUESTS = 16, 20
MAX_GROWTH = 8 << 20
"""Bytes by which the server may grow in a round, 50 kB for each request; 1 MB is usual. A leak lets
it grow in every round, an allocator's reserve only in some."""
PLANS = ("ar", "two-pass", "fused", "auto")


def requests_of(client: int) -> list[dict]:
    return mixed_requests(client, REQUESTS, "prompt", PLANS)


def send(client: httpx.Client, server, number: int, wanted: dict) -> str | None:
    """Send a request, and return the text, or None if the client disconnects early."""
    body = wanted | {"model": server.model}
    if given_up(number):
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
        return None
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not wanted["stream"]:
        return response.json()["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.mark.slow
def test_sixteen_clients(server, session):
    before = server.metric("vllm:request_success_total")
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")

    def work(number: int, indices: range) -> list[str | None]:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            return [send(client, server, index, requests_of(number)[index]) for index in indices]

    def load(first: int, last: int) -> list[list[str | None]]:
        texts = list(pool.map(lambda number: work(number, range(first, last)), range(CLIENTS)))
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            server.wait_until(f"vllm:{name}", 0)
        return texts

    growths: list[int] = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        begun = load(0, REQUESTS // 2)
        while len(growths) < 4 and min(growths, default=MAX_GROWTH) >= MAX_GROWTH:
            held = anonymous_bytes(server.process.pid)
            ended = load(REQUESTS // 2, REQUESTS)
            growths.append(anonymous_bytes(server.process.pid) - held)
    assert min(growths) < MAX_GROWTH
    assert server.metric("vllm:request_success_total", finished_reason="abort") > aborted
    count = CLIENTS * REQUESTS // 2 * (1 + len(growths))
    assert server.metric("vllm:request_success_total") - before == count
    disconnected = 0
    for number, texts in enumerate(map(list.__add__, begun, ended)):
        for wanted, text in zip(requests_of(number), texts, strict=True):
            if text is None:
                disconnected += 1
                continue
            sampling = SamplingParams(temperature=wanted["temperature"], seed=wanted["seed"])
            options = GenerateOptions(wanted["max_tokens"], sampling, plan="ar")
            assert text == session.generate(wanted["prompt"], options).result().text, wanted
    assert disconnected == CLIENTS * REQUESTS // 5
