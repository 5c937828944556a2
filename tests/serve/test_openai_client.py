"""Completions and chats with the openai package have the texts and numbers of a session."""

from __future__ import annotations

import openai
import pytest
from metered import written

PROMPT = "The quick brown fox"
TEXT = "The quick brown fox: Über 12 🦊"
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "for i in range"}]


def complete(server, **fields):
    """Send a completion with the openai package, greedy unless `fields` say otherwise."""
    body = {"model": server.model, "prompt": PROMPT, "temperature": 0}
    return server.client().completions.create(**body | fields)


def choices_of(answer, stream):
    """Return the choices of an answer, or if `stream`, of all its chunks."""
    return [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]


def test_the_served_model_is_listed(server):
    (model,) = server.client().models.list().data
    assert model.id == server.model
    assert server.client().models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("other")


def test_a_completion_has_the_text_and_the_statistics_of_the_session(server, session):
    sampling = {"temperature": 0.9, "seed": 5, "top_p": 0.9}
    expected = written(session, PROMPT, **sampling, top_k=40, plan="ar")
    extra = {"plan": "fused:4,3,2,2,1,1,1", "top_k": 40}  # not of OpenAI's API
    answer = complete(server, max_tokens=24, **sampling, extra_body=extra)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(expected.prompt_ids)
    statistics = answer.choices[0].model_extra["pass"]
    assert statistics["plan"].startswith("fused")
    assert statistics["passes"] > 0
    assert statistics["accepted"] <= statistics["drafted"]


def test_a_chat_has_the_text_of_the_session_whole_and_streamed(server, session):
    expected = written(session, TURNS, chat=True, temperature=0.7, seed=3)
    fields = {"model": server.model, "messages": TURNS, "temperature": 0.7, "seed": 3}
    fields["max_completion_tokens"] = 24
    create = server.client().chat.completions.create
    answer = create(**fields)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    *chunks, last = create(**fields, stream=True, stream_options={"include_usage": True})
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [*[None] * (len(chunks) - 1), "length"]
    assert chunks[-1].choices[0].model_extra["pass"]["seed"] == 3
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == len(expected.token_ids)
    assert last.usage.prompt_tokens == answer.usage.prompt_tokens
    whole_blocks = (answer.usage.prompt_tokens - 1) // 16 * 16  # cached by the first request
    assert last.usage.prompt_tokens_details.cached_tokens == whole_blocks > 0


def test_a_stream_has_usage_only_on_request(server):
    stream = complete(server, max_tokens=4, stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_text_parts_are_joined_and_developer_means_system(server, session):
    expected = written(session, [{"role": "system", "content": "a\nb"}, *TURNS[1:]], chat=True)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts}, *TURNS[1:]]
    answer = server.client().chat.completions.create(
        model=server.model, messages=messages, temperature=0, max_tokens=24
    )
    assert answer.choices[0].message.content == expected.text


def test_n_choices_have_consecutive_seeds(server, session):
    answer = complete(server, n=3, seed=11, temperature=1, max_tokens=16)
    expected = [
        written(session, PROMPT, temperature=1.0, seed=11 + i, max_tokens=16) for i in range(3)
    ]
    assert [choice.text for choice in answer.choices] == [each.text for each in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage.prompt_tokens == len(expected[0].prompt_ids)
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in expected)


def test_a_stop_string_ends_the_text(server, session):
    whole = written(session, PROMPT, max_tokens=40).text
    stop = whole[10:13]
    expected = written(session, PROMPT, max_tokens=40, stop=[stop])
    answer = complete(server, max_tokens=40, stop=[stop, "never"])
    assert answer.choices[0].text == expected.text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["pass"]["stop_reason"] == stop
    assert answer.usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_are_positions_in_the_whole_text(server, stream):
    """Even if text is held back because it may begin a stop string, or a stop string ends it."""

    def tokens_with_offsets(**stops):
        answer = complete(server, max_tokens=24, logprobs=0, **stops, stream=stream)
        return [
            pair
            for choice in choices_of(answer, stream)
            if choice.logprobs
            for pair in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)
        ]

    whole = complete(server, max_tokens=24).choices[0].text
    pairs = tokens_with_offsets()
    assert len(pairs) == 24
    for token, offset in pairs:
        if not token.startswith(("bytes:", "<")):  # special tokens have no text
            assert whole.startswith(token, offset)
    beginnings = [whole[start : start + 3] for start in (0, 2, 5, 9)]
    # The text has these beginnings of stop strings, and no stop string.
    assert tokens_with_offsets(stop=[text + "\u4e16" for text in beginnings]) == pairs
    cut = tokens_with_offsets(stop=[whole[6:9]])
    assert cut == pairs[: len(cut)]
    assert cut[-1][1] >= 6


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats_are_those_of_the_session(server, session, stream):
    expected = written(session, TURNS, chat=True, max_tokens=12, logprobs=2)
    body = {"model": server.model, "messages": TURNS, "temperature": 0, "max_tokens": 12}
    answer = server.client().chat.completions.create(
        **body, logprobs=True, top_logprobs=2, stream=stream
    )
    logprobs = [choice.logprobs for choice in choices_of(answer, stream) if choice.logprobs]
    content = [entry for each in logprobs for entry in each.content]
    values = [entry.logprob for entry in content]
    assert values == pytest.approx([token.logprobs.logprob for token in expected.tokens], abs=1e-4)
    spelled = b"".join(bytes(entry.bytes) for entry in content)
    assert spelled.decode(errors="replace").startswith(expected.text)
    assert expected.text
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    likeliest = [entry.top_logprobs[0].logprob for entry in content]
    assert values == pytest.approx(likeliest, abs=1e-5)  # since decoding is greedy


def test_a_prompt_is_tokenized_and_detokenized(server, session):
    tokenized = server.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}).json()
    ids = session.encode(TEXT)
    assert (tokenized["tokens"], tokenized["count"]) == (ids, len(ids))
    assert tokenized["max_model_len"] == session.backend.capabilities.max_capacity
    assert tokenized["token_strs"] == [session.tokenizer.id_to_token(token) for token in ids]
    back = server.post("/detokenize", {"tokens": ids, "model": server.model}).json()
    assert back["prompt"] == session.tokenizer.decode(ids, skip_special_tokens=False)
    plain = server.post("/tokenize", {"prompt": TEXT, "add_special_tokens": False}).json()["tokens"]
    assert plain == session.tokenizer.encode(TEXT, add_special_tokens=False).ids


def test_messages_have_the_token_ids_of_a_chat(server, session):
    tokenized = server.post("/tokenize", {"messages": TURNS}).json()
    assert tokenized["tokens"] == session.encode_chat(TURNS)
    answer = server.client().chat.completions.create(
        model=server.model, messages=TURNS, max_completion_tokens=1
    )
    assert answer.usage.prompt_tokens == tokenized["count"]
