"""Completions and chats with the openai package have the texts and numbers of a session."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI
from parsing import parse

from pass_runtime import GenerateOptions, SamplingParams
from pass_server.schemas import ChatRequest
from pass_server.serve_options import ServeOptions

PROMPT = "The quick brown fox"
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "for i in range"}]


EOS = 1


def written(session, prompt, *, chat=False, max_tokens=24, **options):
    """Return what a session generates. options: of SamplingParams and of GenerateOptions."""
    names = {"temperature", "top_k", "top_p", "min_p", "seed"} & options.keys()
    sampling = SamplingParams(**{name: options.pop(name) for name in names})
    generate = session.chat if chat else session.generate
    return generate(prompt, GenerateOptions(max_tokens, sampling, **options)).result()


def complete(server, **fields):
    """Send a completion with the openai package, greedy unless `fields` say otherwise."""
    body = {"model": server.model, "prompt": PROMPT, "temperature": 0}
    return server.client().completions.create(**body | fields)


def choices_of(answer, stream):
    """Return the choices of an answer, or if `stream`, of all its chunks."""
    return [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]


def as_bytes(token: str) -> bytes:
    """Return the bytes of a token in `logprobs.tokens`, where the part of a character is written
    like `bytes:\\xe2`."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(byte, 16) for byte in token.removeprefix("bytes:\\x").split("\\x"))


def test_the_served_model_is_listed(server):
    (model,) = server.client().models.list().data
    assert model.id == server.model
    assert server.client().models.retrieve(server.model).id == server.model
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("other")


@pytest.mark.parametrize("plan", ["ar", "two-pass", "fused", "fused:4,3,2,2,1,1,1", "auto"])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 5, "top_k": 40, "top_p": 0.9}]
)
def test_every_plan_writes_the_text_of_the_session(server, session, plan, sampling):
    expected = written(session, PROMPT, **sampling, plan="ar")
    fields = dict(sampling)
    extra = {"plan": plan, "top_k": fields.pop("top_k", None)}  # not of OpenAI's API
    answer = complete(server, max_tokens=24, **fields, extra_body=extra)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(expected.prompt_ids)
    statistics = answer.choices[0].model_extra["pass"]
    assert statistics["plan"].startswith(plan.partition(":")[0])
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


def test_an_answer_can_be_sent_back(server):
    client = server.client()
    first = client.chat.completions.create(model=server.model, messages=TURNS, max_tokens=4)
    messages = [*TURNS, first.choices[0].message, TURNS[1]]
    assert client.chat.completions.create(
        model=server.model, messages=messages, max_tokens=4
    ).choices


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


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_may_be_texts_or_token_ids_one_or_several(server, session, stream):
    texts = ["The quick", "import numpy", "Über"]
    ids = [session.encode(text) for text in texts]
    expected = [written(session, text, max_tokens=12).text for text in texts]
    for prompt, count in [(texts[0], 1), (texts, 3), (ids[0], 1), (ids, 3)]:
        texts_written = [""] * count
        answer = complete(server, prompt=prompt, max_tokens=12, stream=stream)
        for choice in choices_of(answer, stream):
            texts_written[choice.index] += choice.text
        assert texts_written == expected[:count]


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
def test_logprobs_of_completions_are_those_of_the_session(server, session, stream):
    expected = written(session, PROMPT, max_tokens=12, logprobs=3)
    answer = complete(server, max_tokens=12, logprobs=3, stream=stream)
    logprobs = [choice.logprobs for choice in choices_of(answer, stream) if choice.logprobs]
    values = [value for each in logprobs for value in each.token_logprobs]
    assert values == pytest.approx([token.logprobs.logprob for token in expected.tokens], abs=1e-4)
    spelled = b"".join(as_bytes(token) for each in logprobs for token in each.tokens)
    assert spelled.decode(errors="replace").startswith(expected.text)
    assert all(len(top) == 3 for each in logprobs for top in each.top_logprobs)
    offsets = [offset for each in logprobs for offset in each.text_offset]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)


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


def test_speculative_false_drafts_nothing(server):
    for extra, drafts in (
        ({"speculative": False}, False),
        ({"speculative": True, "plan": "fused"}, True),
    ):
        answer = complete(server, max_tokens=16, extra_body=extra)
        assert (answer.choices[0].model_extra["pass"]["drafted"] > 0) == drafts


def test_streams_of_async_clients_at_once_have_the_texts_of_the_session(server, session):
    prompts = [f"{PROMPT} {i}" for i in range(8)]
    expected = [
        written(session, prompt, temperature=0.8, seed=i, max_tokens=20).text
        for i, prompt in enumerate(prompts)
    ]

    async def ask(client, i):
        body = {"model": server.model, "prompt": prompts[i], "temperature": 0.8, "seed": i}
        stream = await client.completions.create(**body, max_tokens=20, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main():
        url = f"{server.url}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(8)))

    assert asyncio.run(main()) == expected


def test_errors_are_those_of_the_openai_package(server):
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        server.client().completions.create(model=server.model, prompt="a", presence_penalty=3.0)
    assert refused.value.param == "presence_penalty"
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    "content", ["a<eos>b", [{"type": "text", "text": "a<eo"}, {"type": "text", "text": "<eos>"}]]
)
def test_special_tokens_that_a_message_spells_are_text(server, session, content):
    """They are tokens if the server has the option `special_tokens`."""
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    messages = [{"role": "user", "content": text}]
    ids = session.encode_chat(messages)
    assert ids.count(EOS) == 0
    fields = {"model": server.model, "messages": [{"role": "user", "content": content}]}
    answer = server.client().chat.completions.create(**fields, max_tokens=1)
    assert answer.usage.prompt_tokens == len(ids)
    parsed = parse(session, ServeOptions(special_tokens=True), ChatRequest(**fields))
    assert [*parsed.requests[0].prompt_ids] == session.encode_chat(
        messages, allow_special_tokens=True
    )
    assert parsed.requests[0].prompt_ids.count(EOS) == 1
