"""/tokenize and /detokenize: the ids that a request's prompt has, and back."""

from __future__ import annotations

import httpx
import pytest

TEXT = "The quick brown fox: Über 12 🦊"
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]


def post(server, path: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/{path}", json=fields, timeout=60)


def test_a_prompt_there_and_back(server, session):
    found = post(server, "tokenize", prompt=TEXT, return_token_strs=True).json()
    ids = session.encode(TEXT)
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert found["max_model_len"] == session.backend.capabilities.max_capacity
    assert found["token_strs"] == [session.tokenizer.id_to_token(token) for token in ids]
    back = post(server, "detokenize", tokens=ids, model=server.model).json()
    assert back["prompt"] == session.tokenizer.decode(ids, skip_special_tokens=False)
    plain = post(server, "tokenize", prompt=TEXT, add_special_tokens=False).json()["tokens"]
    assert plain == session.tokenizer.encode(TEXT, add_special_tokens=False).ids


def test_messages_are_those_of_a_chat(server, session):
    found = post(server, "tokenize", messages=TURNS).json()
    assert found["tokens"] == session.encode_chat(TURNS)
    answer = server.client().chat.completions.create(
        model=server.model, messages=TURNS, max_completion_tokens=1
    )
    assert answer.usage.prompt_tokens == found["count"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": TURNS}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "model": "another"}, 404, "model"),
        (
            "tokenize",
            {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "tools",
        ),
        ("tokenize", {"prompt": 5}, 400, "prompt"),
        ("tokenize", {"messages": TURNS, "add_special_tokens": True}, 400, "add_special_tokens"),
        (
            "tokenize",
            {"messages": TURNS, "add_generation_prompt": False},
            400,
            "add_generation_prompt",
        ),
        ("tokenize", {"prompt": "a", "unknown": 1}, 400, "unknown"),
        ("detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("detokenize", {}, 400, "tokens"),
    ],
)
def test_what_is_wrong_is_said(server, path: str, fields: dict, status: int, param: str):
    found = post(server, path, **fields)
    assert found.status_code == status, found.text
    assert found.json()["error"]["param"] == param
