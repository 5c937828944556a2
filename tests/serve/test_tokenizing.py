"""/tokenize and /detokenize: the token ids of prompts and messages, and their text."""

from __future__ import annotations

import httpx
import pytest

TEXT = "The quick brown fox: Über 12 🦊"
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
TOOL = {"type": "function", "function": {"name": "f"}}
WITHOUT_GENERATION_PROMPT = {"messages": TURNS, "add_generation_prompt": False}


def post(server, path: str, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/{path}", json=fields, timeout=60)


def test_a_prompt_is_tokenized_and_detokenized(server, session):
    tokenized = post(server, "tokenize", prompt=TEXT, return_token_strs=True).json()
    ids = session.encode(TEXT)
    assert (tokenized["tokens"], tokenized["count"]) == (ids, len(ids))
    assert tokenized["max_model_len"] == session.backend.capabilities.max_capacity
    assert tokenized["token_strs"] == [session.tokenizer.id_to_token(token) for token in ids]
    back = post(server, "detokenize", tokens=ids, model=server.model).json()
    assert back["prompt"] == session.tokenizer.decode(ids, skip_special_tokens=False)
    plain = post(server, "tokenize", prompt=TEXT, add_special_tokens=False).json()["tokens"]
    assert plain == session.tokenizer.encode(TEXT, add_special_tokens=False).ids


def test_messages_have_the_token_ids_of_a_chat(server, session):
    tokenized = post(server, "tokenize", messages=TURNS).json()
    assert tokenized["tokens"] == session.encode_chat(TURNS)
    answer = server.client().chat.completions.create(
        model=server.model, messages=TURNS, max_completion_tokens=1
    )
    assert answer.usage.prompt_tokens == tokenized["count"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": TURNS}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "model": "another"}, 404, "model"),
        ("tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "tools"),
        ("tokenize", {"prompt": 5}, 400, "prompt"),
        ("tokenize", {"messages": TURNS, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("tokenize", WITHOUT_GENERATION_PROMPT, 400, "add_generation_prompt"),
        ("tokenize", {"prompt": "a", "unknown": 1}, 400, "unknown"),
        ("detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [5], "model": "another"}, 404, "model"),
    ],
)
def test_wrong_requests_are_refused(server, path: str, fields: dict, status: int, param: str):
    answer = post(server, path, **fields)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param
