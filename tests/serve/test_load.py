"""Many clients at once, some of whom give up: nothing is lost, nothing is wrong, every slot is free
in the end."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
from metered import given_up, mixed_requests
from process_memory import anonymous_bytes

from pass_runtime import GenerateOptions, SamplingParams

CLIENTS, REQUESTS = 16, 20
LITTLE = 8 << 20
"""50 kB for each request; 1 MB is seen. What leaks grows by more each time, what an allocator keeps
does not."""
PLANS = ("ar", "two-pass", "fused", "auto")


def requests_of(client: int) -> list[dict]:
    return mixed_requests(client, REQUESTS, "prompt", PLANS)


def send(client: httpx.Client, server, number: int, wanted: dict) -> str | None:
    """The text; None where it was given up."""
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


def test_sixteen_clients(server, session):
    before = server.metric("vllm:request_success_total")
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")

    def work(number: int, places: range) -> list[str | None]:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            return [send(client, server, place, requests_of(number)[place]) for place in places]

    def load(first: int, last: int) -> list[list[str | None]]:
        found = list(pool.map(lambda number: work(number, range(first, last)), range(CLIENTS)))
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
        ):
            server.wait_until(name, 0)
        return found

    growths: list[int] = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        begun = load(0, REQUESTS // 2)
        while len(growths) < 4 and min(growths, default=LITTLE) >= LITTLE:
            held = anonymous_bytes(server.process.pid)
            ended = load(REQUESTS // 2, REQUESTS)
            growths.append(anonymous_bytes(server.process.pid) - held)
    assert min(growths) < LITTLE
    assert server.metric("vllm:request_success_total", finished_reason="abort") > aborted
    assert server.metric("vllm:request_success_total") - before == CLIENTS * REQUESTS // 2 * (
        1 + len(growths)
    )
    left = 0
    for number, texts in enumerate(map(list.__add__, begun, ended)):
        for wanted, text in zip(requests_of(number), texts, strict=True):
            if text is None:
                left += 1
                continue
            sampling = SamplingParams(temperature=wanted["temperature"], seed=wanted["seed"])
            options = GenerateOptions(
                max_new_tokens=wanted["max_tokens"], sampling=sampling, plan="ar"
            )
            assert text == session.generate(wanted["prompt"], options).result().text, wanted
    assert left == CLIENTS * REQUESTS // 5
