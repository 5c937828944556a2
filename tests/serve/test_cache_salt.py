"""What one client sent is found in the cache by nobody who has another API key or another
`cache_salt`."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from fake_triton import Metric, Request, model_of, wait_until

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
    """An app over the session, and what it finds in the cache."""

    def __init__(self, session: Session, *keys: str) -> None:
        self._session = session
        self._app = make_app(session, ServeOptions(model_name="m", keys=keys))
        session.generate_ids([5], None).result()  # so that the slots are those of this test

    def post(self, path: str, key: str = "", **fields: object) -> httpx.Response:
        async def post() -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://x", headers=headers
            ) as client:
                return await client.post(path, json={"model": "m", "temperature": 0} | fields)

        return asyncio.run(post())

    def cached(self, key: str = "", prompt: list[int] = PROMPT, **fields: object) -> int:
        answer = self.post("/v1/completions", key, prompt=prompt, max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_keys_part_clients(opened: Session):
    client, prompt = Client(opened, "one", "two"), [3, *PROMPT]
    assert [client.cached(key, prompt) for key in ("one", "two", "one", "two")] == [0, 0, 96, 96]
    assert client.cached("one", prompt, cache_salt="a") == 0
    assert client.cached("two", prompt, cache_salt="a") == 0
    assert client.cached("one", prompt, cache_salt="a") == 96


def test_salts_part_requests_of_a_server_without_keys(opened: Session):
    client, prompt = Client(opened), [4, *PROMPT]
    assert [client.cached("", prompt, cache_salt=salt) for salt in ("a", "b", "a")] == [0, 0, 96]
    assert client.cached("", prompt) == 0
    assert client.cached("any", prompt) == 96  # keys are not looked at here
    assert client.cached("", prompt, n=2, cache_salt="c", seed=1) == 0  # its choices share it


def test_no_salt_stands_for_another_key(opened: Session):
    """Whatever a client sends: the digest of a key comes first, and has one length."""
    client, prompt = Client(opened, "one", "two"), [5, *PROMPT]
    assert [client.cached("one", prompt) for _ in range(2)] == [0, 96]
    digest = hashlib.sha256(b"one").hexdigest()
    for salt in ("one", digest, hashlib.sha256(b"two").hexdigest() + digest):
        assert client.cached("two", prompt, cache_salt=salt) == 0


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_the_other_endpoints(opened: Session, path: str):
    client = Client(opened, "one", "two")

    def cached(key: str, **fields: object) -> int:
        if path == "responses":
            usage = client.post(
                "/v1/responses", key, input=TEXT, max_output_tokens=1, **fields
            ).json()["usage"]
            return usage["input_tokens_details"]["cached_tokens"]
        messages = [{"role": "user", "content": TEXT}]
        usage = client.post(
            "/v1/chat/completions", key, messages=messages, max_tokens=1, **fields
        ).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    salts = {"cache_salt": path}  # of this test
    first, *others = [cached(key, **salts) for key in ("one", "two", "one")]
    assert first == others[0] == 0 < others[1]
    assert others[1] % 16 == 0
    assert cached("one", cache_salt=f"{path} b") == 0


@pytest.mark.parametrize("salt", ["", 7, "a" * 257])
def test_a_salt_is_a_short_text(opened: Session, salt: object):
    answer = Client(opened).post("/v1/completions", prompt=PROMPT, cache_salt=salt)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


def test_a_guess_of_the_next_digit_tells_nothing(opened: Session):
    """All digits of the block must be right before anything shows."""
    client, known = Client(opened), [7, *PROMPT[:35]]
    client.cached(prompt=[*known, 14, 15, 16, 17, *PROMPT])
    assert {client.cached(prompt=[*known, digit, 9]) for digit in range(10, 20)} == {32}


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
    said = f"the plan {plan} could change texts: activations are rounded to 8 bits here"
    with load(rounding_bundle, "cpu", threads=1, max_batch_size=2) as session:
        client = Client(session)
        for path, fields in (("completions", {"prompt": "A"}), ("responses", {"input": "A"})):
            answer = client.post(f"/v1/{path}", plan=plan, **fields)
            assert answer.status_code == 400 and said in answer.json()["error"]["message"]
        assert client.post("/v1/completions", plan="fused", prompt="A").status_code == 200
    with model_of(rounding_bundle, tmp_path / "model") as model:
        request = Request(text_input=[b"A"], plan=np.array([plan.encode()], object))
        model.execute([request])
        request.wait_until_ended()
        assert request.error.code == "INVALID_ARG" and said in request.error.message
