"""Many clients at once, some of whom give up: nothing is lost, nothing is wrong, every slot is free in the end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
from metered import given_up, mixed_requests

from pass_runtime import GenerateOptions, SamplingParams

CLIENTS, REQUESTS = 8, 10
PLANS = ("ar", "two-pass", "fused", "auto")


def requests_of(client: int) -> list[dict]:
    return mixed_requests(client, REQUESTS, "prompt", PLANS)


def send(client: httpx.Client, server, number: int, asked: dict) -> str | None:
    """The text; None where it was given up."""
    body = asked | {"model": server.model}
    if given_up(number):
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
        return None
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    if not asked["stream"]:
        return response.json()["choices"][0]["text"]
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return "".join(httpx.Response(200, text=event).json()["choices"][0]["text"] for event in events)


def test_eight_clients(server, session):
    before = server.metric("vllm:request_success_total")

    def work(number: int) -> list[str | None]:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            return [send(client, server, place, asked) for place, asked in enumerate(requests_of(number))]

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(work, range(CLIENTS)))
    server.wait_until("vllm:num_requests_running", 0)
    server.wait_until("vllm:num_requests_waiting", 0)
    assert server.metric("vllm:request_success_total") - before == CLIENTS * REQUESTS
    left = 0
    for number, texts in enumerate(found):
        for asked, text in zip(requests_of(number), texts, strict=True):
            if text is None:
                left += 1
                continue
            sampling = SamplingParams(temperature=asked["temperature"], seed=asked["seed"])
            options = GenerateOptions(max_new_tokens=asked["max_tokens"], sampling=sampling, plan="ar")
            assert text == session.generate(asked["prompt"], options).run().text, asked
    assert left == CLIENTS * REQUESTS // 5
