"""SIGTERM while Triton streams: answers finish or end with an error, and the exit status is 0."""

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

REQUEST = {
    "text_input": "The",
    "temperature": 0.0,
    "plan": "ar",
    "ignore_eos": True,
    "stream": True,
}
DRAIN_SECONDS = 1


@pytest.fixture(scope="module")
def repository(random_bundle, tmp_path_factory) -> Path:
    """A repository with the model `slow`, which has two slots and takes 30 ms a pass."""
    require_triton()
    directory = tmp_path_factory.mktemp("models")
    config = RepositoryConfig(
        random_bundle,
        directory,
        "slow",
        parameters={"max_batch_size": 2, "drain_seconds": DRAIN_SECONDS},
    )
    with (write_model(config) / "1" / "model.py").open("a") as file:
        file.write(SLOW)
    return directory


def over_http(server: Triton, tokens: int) -> tuple[str, str | None]:
    url, text = f"{server.http}/v2/models/slow/generate_stream", ""
    with httpx.stream("POST", url, json=REQUEST | {"max_tokens": tokens}, timeout=60) as response:
        for line in response.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line else {}
            if "error" in event:
                return text, event["error"]
            text += event.get("text_output", "")
    return text, None


def over_grpc(server: Triton, tokens: int) -> tuple[str, str | None]:
    from tritonclient.utils import InferenceServerException

    responses = []
    with Client(server) as client:
        client.begin("slow", **REQUEST, max_tokens=tokens)
        try:
            responses += client.responses()
        except InferenceServerException as error:
            return text_of(responses), error.message()
    return text_of(responses), None


@pytest.mark.slow
@pytest.mark.parametrize("to_models", [False, True])
def test_after_sigterm_answers_finish_or_end_with_an_error(
    repository, session, tmp_path, to_models
):
    """The server waits for all answers; models that get the signal, too, for `drain_seconds`."""
    tokens = 700 if to_models else 100
    with (
        Triton(repository, tmp_path / "log", "--exit-timeout-secs=30") as server,
        ThreadPoolExecutor(2) as pool,
    ):
        futures = [pool.submit(over, server, tokens) for over in (over_http, over_grpc)]
        server.wait_until("vllm:num_requests_running", 2)
        (os.killpg if to_models else os.kill)(server.process.pid, signal.SIGTERM)
        options = GenerateOptions(max_new_tokens=tokens, plan="ar", ignore_eos=True)
        whole = session.generate("The", options).result().text
        for answer in futures:
            text, error = answer.result(timeout=30)
            assert error == ("the server is shutting down" if to_models else None)
            assert text
            assert whole.startswith(text) if to_models else text == whole
        assert server.process.wait(timeout=30) == 0, server.log_text
