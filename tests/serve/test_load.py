"""Many clients at once, some of whom give up: nothing is lost, nothing is wrong, every slot is free in the end."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx

from pass_runtime import GenerateOptions, SamplingParams

CLIENTS, REQUESTS = 8, 10
PLANS = ("ar", "two-pass", "fused", "auto")


def requests_of(client: int) -> list[dict]:
    """Of mixed lengths, plans and kinds; every fifth is given up."""
    rng = random.Random(client)  # of its own: clients are threads
    return [
        {
            "prompt": [rng.randrange(2, 300) for _ in range(rng.randrange(1, 80))],
            "max_tokens": rng.randrange(1, 60),
            "temperature": rng.choice([0, 0.8]),
            "seed": rng.randrange(1 << 40),
            "plan": rng.choice(PLANS),
            "stream": stopped or rng.random() < 0.5,
            "stopped": stopped,
        }
        for number in range(REQUESTS)
        for stopped in [number % 5 == 4]
    ]


def send(client: httpx.Client, server, asked: dict) -> str | None:
    """The text; None where it was given up."""
    body = {key: value for key, value in asked.items() if key != "stopped"} | {"model": server.model}
    if asked["stopped"]:
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
            return [send(client, server, asked) for asked in requests_of(number)]

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(work, range(CLIENTS)))
    server.wait_until("vllm:num_requests_running", 0)
    server.wait_until("vllm:num_requests_waiting", 0)
    assert server.metric("vllm:request_success_total") - before == CLIENTS * REQUESTS
    given_up = 0
    for number, texts in enumerate(found):
        for asked, text in zip(requests_of(number), texts, strict=True):
            if text is None:
                given_up += 1
                continue
            sampling = SamplingParams(temperature=asked["temperature"], seed=asked["seed"])
            options = GenerateOptions(max_new_tokens=asked["max_tokens"], sampling=sampling, plan="ar")
            assert text == session.generate(asked["prompt"], options).run().text, asked
    assert given_up == CLIENTS * REQUESTS // 5
