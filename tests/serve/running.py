"""`pass-run serve` in a process of its own, and the requests that tests send to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from metered import Metered
from openai import OpenAI

PASS_RUN = [sys.executable, "-m", "pass_runtime.cli.main"]


ENDLESS = {"prompt": "a", "max_tokens": 600, "plan": "ar", "ignore_eos": True}


class Api(Metered):
    """A server of `model`. Prompts are short and decoding is greedy unless fields say otherwise."""

    model: str

    def post(self, path: str, content: object = None, **options: object) -> httpx.Response:
        raise NotImplementedError

    def complete(self, **fields: object) -> httpx.Response:
        body = {"model": self.model, "prompt": "The quick", "temperature": 0}
        return self.post("/v1/completions", body | fields)

    def chat(self, **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": "The quick"}]
        body = {"model": self.model, "messages": messages, "temperature": 0}
        return self.post("/v1/chat/completions", body | fields)


class Server(Api):
    """`pass-run serve BUNDLE *arguments` on a free loopback port. Its output goes to `log`."""

    def __init__(
        self, bundle: Path, log: Path, *arguments: object, command: list[str] = PASS_RUN
    ) -> None:
        self.log = log
        flags = ["--port", "0", "--threads", "1", *map(str, arguments)]
        line = [*command, "serve", str(bundle), *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(line, stdout=file, stderr=file, env=environment)
        self.url = self.metrics_url = self._address()

    def _address(self) -> str:
        """Return the address that the log says, after a minute at most. Set `model` to its name."""
        for _ in range(1200):
            if match := re.search(r"(?m)^(.+) is served at (\S+)/v1$", self.log_text):
                self.model = match[1]
                return match[2]
            assert self.process.poll() is None, self.log_text
            time.sleep(0.05)
        raise AssertionError(f"no address: {self.log_text}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def client(self, key: str = "none", **options: object) -> OpenAI:
        options = {"max_retries": 0, "timeout": 60} | options
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def post(self, path: str, content: object = None, **options: object) -> httpx.Response:
        return httpx.post(self.url + path, json=content, timeout=60, **options)

    def post_body(self, path: str, body: bytes | str) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return httpx.post(self.url + path, content=body, headers=headers, timeout=120)

    @contextmanager
    def stream(self, **fields: object) -> Iterator[Iterator[str]]:
        """Begin to stream a completion, and give its later events."""
        url, body = f"{self.url}/v1/completions", ENDLESS | {"model": self.model, "stream": True}
        with httpx.stream("POST", url, json=body | fields, timeout=60) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            yield (line.removeprefix("data: ") for line in lines if line)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_status(self) -> int:
        return self.process.wait(timeout=60)


def expect_error(response: httpx.Response, status: int) -> dict:
    """Assert that a response has this status and an error in OpenAI's shape. Return the error."""
    assert response.status_code == status, response.text
    problem = response.json()["error"]
    assert set(problem) == {"message", "type", "param", "code"}
    assert problem["message"]
    assert "\n" not in problem["message"]
    return problem
