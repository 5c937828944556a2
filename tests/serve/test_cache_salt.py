"""A client's cached prompts are not reused for another API key or another `cache_salt`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_triton import Metric, Request, model_of, wait_until
from starlette.testclient import TestClient

from pass_runtime import Session, load
from pass_server.app import make_app
from pass_server.serve_options import ServeOptions

PROMPT = list(range(20, 120))
TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def opened(random_bundle: Path) -> Iterator[Session]:
    with load(random_bundle, "cpu", threads=1, max_batch_size=2) as session:
        yield session


class Client:
    """A client of an app over the session, which reads how many prompt tokens were cached."""

    def __init__(self, session: Session, *keys: str) -> None:
        self._http = TestClient(make_app(session, ServeOptions(model_name="m", keys=keys)))
        session.generate_ids([5], None).result()  # overwrites the slot of an earlier test

    def post(self, path: str, key: str = "", **fields: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self._http.post(
            path, json={"model": "m", "temperature": 0} | fields, headers=headers
        )

    def cached(self, key: str = "", prompt: list[int] = PROMPT, **fields: object) -> int:
        answer = self.post("/v1/completions", key, prompt=prompt, max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_clients_with_different_keys_share_nothing(opened: Session):
    client, prompt = Client(opened, "one", "two"), [3, *PROMPT]
    assert [client.cached(key, prompt) for key in ("one", "two", "one", "two")] == [0, 0, 96, 96]
    assert client.cached("one", prompt, cache_salt="a") == 0
    assert client.cached("two", prompt, cache_salt="a") == 0
    assert client.cached("one", prompt, cache_salt="a") == 96


def test_requests_with_different_salts_share_nothing(opened: Session):
    client, prompt = Client(opened), [4, *PROMPT]
    assert [client.cached("", prompt, cache_salt=salt) for salt in ("a", "b", "a")] == [0, 0, 96]
    assert client.cached("", prompt) == 0
    assert client.cached("any", prompt) == 96  # a server without keys ignores them
    # The second of the two choices reuses the first one's prompt, which does not count.
    assert client.cached("", prompt, n=2, cache_salt="c", seed=1) == 0


def test_no_salt_can_imitate_another_key(opened: Session):
    """The cache's salt begins with a digest of the key, whose length is fixed."""
    client, prompt = Client(opened, "one", "two"), [5, *PROMPT]
    assert [client.cached("one", prompt) for _ in range(2)] == [0, 96]
    digest = hashlib.sha256(b"one").hexdigest()
    for salt in ("one", digest, hashlib.sha256(b"two").hexdigest() + digest):
        assert client.cached("two", prompt, cache_salt=salt) == 0


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_the_other_endpoints(opened: Session, path: str):
    client = Client(opened, "one", "two")
    messages = [{"role": "user", "content": TEXT}]
    of_responses = {"input": TEXT, "max_output_tokens": 1}
    of_chats = {"messages": messages, "max_tokens": 1}
    body = of_responses if path == "responses" else of_chats

    def cached(key: str, salt: str) -> int:
        usage = client.post(f"/v1/{path}", key, cache_salt=salt, **body).json()["usage"]
        details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
        return details["cached_tokens"]

    first, other_key, again = (cached(key, path) for key in ("one", "two", "one"))
    assert first == other_key == 0 < again
    assert again % 16 == 0
    assert cached("one", f"{path} b") == 0


@pytest.mark.parametrize("salt", ["", 7, "a" * 257])
def test_wrong_salts_are_refused(opened: Session, salt: object):
    answer = Client(opened).post("/v1/completions", prompt=PROMPT, cache_salt=salt)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


def test_only_whole_blocks_of_a_prompt_can_be_guessed(opened: Session):
    """The count of cached tokens does not say whether the first token of a block is right."""
    client, start = Client(opened), [7, *PROMPT[:35]]
    client.cached(prompt=[*start, 14, 15, 16, 17, *PROMPT])
    assert {client.cached(prompt=[*start, digit, 9]) for digit in range(10, 20)} == {32}


def test_triton(random_bundle: Path, tmp_path: Path):
    with model_of(random_bundle, tmp_path / "model") as model:
        hits = []
        for salt in ("a", "b", "a"):
            parameters = np.array([json.dumps({"cache_salt": salt}).encode()], object)
            request = Request(text_input=[TEXT.encode()], sampling_parameters=parameters)
            model.execute([request])
            request.wait_until_ended()
            assert request.error is None
            wait_until(lambda: model._sink._queue.empty())
            hits.append(Metric.sums.get("vllm:prefix_cache_hits_total", 0))
    assert hits[0] == hits[1] == 0 < hits[2]


@pytest.mark.parametrize("plan", ["tree-5", "tree:2,0,1,1"])
def test_trees_that_could_change_texts_are_refused(
    rounding_bundle: Path, tmp_path: Path, plan: str
):
    reason = f"the plan {plan} could change texts: activations are rounded to 8 bits here"
    with load(rounding_bundle, "cpu", threads=1, max_batch_size=2) as session:
        client = Client(session)
        for path, fields in (("completions", {"prompt": "A"}), ("responses", {"input": "A"})):
            answer = client.post(f"/v1/{path}", plan=plan, **fields)
            assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
        assert client.post("/v1/completions", plan="fused", prompt="A").status_code == 200
    with model_of(rounding_bundle, tmp_path / "model") as model:
        request = Request(text_input=[b"A"], plan=np.array([plan.encode()], object))
        model.execute([request])
        request.wait_until_ended()
        assert request.error.code == "INVALID_ARG" and reason in request.error.message
