from __future__ import annotations

import hashlib
from collections.abc import Iterator

import httpx
import pytest
from in_process import App

from pass_runtime import Session, load

PROMPT = list(range(20, 120))
"""Each test puts a token of its own before it, so that it does not find the prompts of other tests.
Of these 101 tokens, the six whole blocks of 16 can be cached."""
TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def opened(random_bundle) -> Iterator[Session]:
    with load(random_bundle, "cpu", threads=1, max_batch_size=2) as session:
        yield session


class Client(App):
    def __init__(self, session: Session, *keys: str) -> None:
        super().__init__(session, keys=keys)
        session.generate_ids([5], None).result()  # overwrites the slot of an earlier test

    def ask(self, path: str, key: str = "", **fields: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return self.post(path, {"model": "m", "temperature": 0} | fields, headers=headers)

    def cached_tokens(self, key: str = "", prompt: list[int] = PROMPT, **fields: object) -> int:
        answer = self.ask("/v1/completions", key, prompt=prompt, max_tokens=1, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_requests_with_different_salts_share_nothing(opened):
    client, prompt = Client(opened), [4, *PROMPT]
    hits = [client.cached_tokens("", prompt, cache_salt=salt) for salt in ("a", "b", "a")]
    assert hits == [0, 0, 96]
    assert client.cached_tokens("", prompt) == 0  # without a salt
    assert client.cached_tokens("any", prompt) == 96  # a server without keys ignores them
    # The second choice reuses the prompt of the first one, which is not counted.
    assert client.cached_tokens("", prompt, n=2, cache_salt="c", seed=1) == 0


def test_no_salt_can_imitate_another_key(opened):
    """The server puts a digest of the key, whose length is fixed, before the salt of a request."""
    client, prompt = Client(opened, "one", "two"), [5, *PROMPT]
    assert [client.cached_tokens("one", prompt) for _ in range(2)] == [0, 96]
    digest = hashlib.sha256(b"one").hexdigest()
    for salt in ("one", digest, hashlib.sha256(b"two").hexdigest() + digest):
        assert client.cached_tokens("two", prompt, cache_salt=salt) == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": TEXT, "max_tokens": 1}),
        ("chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}),
        ("responses", {"input": TEXT, "max_output_tokens": 1}),
    ],
)
def test_clients_with_different_keys_or_salts_share_nothing(opened, path, body):
    client = Client(opened, "one", "two")

    def cached_tokens(key: str, salt: str) -> int:
        usage = client.ask(f"/v1/{path}", key, cache_salt=salt, **body).json()["usage"]
        details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
        return details["cached_tokens"]

    first, other_key, again = (cached_tokens(key, path) for key in ("one", "two", "one"))
    assert first == other_key == 0 < again
    assert again % 16 == 0
    assert cached_tokens("one", f"{path} b") == cached_tokens("two", f"{path} b") == 0


@pytest.mark.parametrize("salt", ["", 7, "a" * 257])
def test_wrong_salts_are_refused(opened, salt):
    answer = Client(opened).ask("/v1/completions", prompt=PROMPT, cache_salt=salt)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"
