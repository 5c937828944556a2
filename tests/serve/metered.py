"""For tests of pass-run serve and of Triton: a server's metrics, the requests of many clients, and
what a session answers."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from pass_runtime import GenerateOptions, SamplingParams


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Metered:
    """A server whose metrics are at `metrics_url`/metrics, in the text format of Prometheus."""

    metrics_url: str

    def metrics(self) -> str:
        return httpx.get(f"{self.metrics_url}/metrics", timeout=30).text

    def metric(self, name: str, **labels: str) -> float:
        total = 0.0
        for line in self.metrics().splitlines():
            if match := re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line):
                labels_of_sample = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                if match[1] == name and labels.items() <= labels_of_sample.items():
                    total += float(match[3])
        return total

    def wait_until(self, name: str, value: float, seconds: float = 20, **labels: str) -> None:
        deadline = time.monotonic() + seconds
        while (current := self.metric(name, **labels)) != value:
            assert time.monotonic() < deadline, f"{name} is {current}, not {value}"
            time.sleep(0.02)


def mixed_requests(
    client: int, count: int, prompt_field: str, plans: Sequence[str]
) -> list[dict[str, Any]]:
    """Return `count` requests of mixed lengths, plans and sampling, which depend on the number of
    the client alone. prompt_field: the field for the prompt's token ids."""
    rng = random.Random(client)
    return [
        {
            prompt_field: [rng.randrange(2, 300) for _ in range(rng.randrange(1, 80))],
            "max_tokens": rng.randrange(1, 60),
            "temperature": rng.choice([0.0, 0.8]),
            "seed": rng.randrange(1 << 40),
            "plan": rng.choice(plans),
            "stream": disconnects_early(number) or rng.random() < 0.5,
        }
        for number in range(count)
    ]


def disconnects_early(number: int) -> bool:
    return number % 5 == 4


def written(session, prompt, *, chat=False, max_tokens=24, **options):
    """Return what a session generates. options: of SamplingParams and of GenerateOptions."""
    names = {"temperature", "top_k", "top_p", "min_p", "seed"} & options.keys()
    sampling = SamplingParams(**{name: options.pop(name) for name in names})
    generate = session.chat if chat else session.generate
    return generate(prompt, GenerateOptions(max_tokens, sampling, **options)).result()
