"""SIGTERM while Triton streams: answers finish or their clients get an error; the server ends with
status 0."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from triton_server import SLOW, Client, Triton, require_triton, text_of

from pass_exporter.triton import RepositoryConfig, write_model
from pass_runtime import GenerateOptions

ASKED = {"text_input": "The", "temperature": 0.0, "plan": "ar", "ignore_eos": True, "stream": True}
DRAIN_SECONDS = 1


@pytest.fixture(scope="module")
def repository(random_bundle, tmp_path_factory) -> Path:
    """A model `slow`: two slots, 30 ms a pass."""
    require_triton()
    directory = tmp_path_factory.mktemp("models")
    config = RepositoryConfig(
        random_bundle, directory, "slow", max_batch_size=2, drain_seconds=DRAIN_SECONDS
    )
    with (write_model(config) / "1" / "model.py").open("a") as file:
        file.write(SLOW)
    return directory


def over_http(server: Triton, tokens: int) -> tuple[str, str | None]:
    """-> (the text that came, the error that it ended with)."""
    url, text = f"{server.http}/v2/models/slow/generate_stream", ""
    with httpx.stream("POST", url, json=ASKED | {"max_tokens": tokens}, timeout=60) as response:
        for line in response.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line else {}
            if "error" in event:
                return text, event["error"]
            text += event.get("text_output", "")
    return text, None


def over_grpc(server: Triton, tokens: int) -> tuple[str, str | None]:
    from tritonclient.utils import InferenceServerException

    came = []
    with Client(server) as client:
        client.begin("slow", **ASKED, max_tokens=tokens)
        try:
            came += client.responses()
        except InferenceServerException as error:
            return text_of(came), error.message()
    return text_of(came), None


@pytest.mark.parametrize("everybody", [False, True])
def test_sigterm(repository, session, tmp_path, everybody):
    """To the server alone, which waits as long as its time-out allows; or to its models as well,
    which then tell whom they cannot finish for."""
    tokens = 700 if everybody else 100
    with (
        Triton(repository, tmp_path / "log", "--exit-timeout-secs=30") as server,
        ThreadPoolExecutor(2) as pool,
    ):
        futures = [pool.submit(over, server, tokens) for over in (over_http, over_grpc)]
        server.wait_until("vllm:num_requests_running", 2)
        (os.killpg if everybody else os.kill)(server.process.pid, signal.SIGTERM)
        whole = (
            session.generate(
                "The", GenerateOptions(max_new_tokens=tokens, plan="ar", ignore_eos=True)
            )
            .result()
            .text
        )
        for answer in futures:
            text, error = answer.result(timeout=30)
            assert error == ("the server is shutting down" if everybody else None)
            assert text
            assert whole.startswith(text) if everybody else text == whole
        assert server.process.wait(timeout=30) == 0, server.said
