"""Every field of a request changes its answer, or is refused by name, or is documented as not
used."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from parsing import parse
from tokenizers.processors import TemplateProcessing
from tool_models import THINKING, TOOLS, with_template

from pass_runtime import LoadOptions, load
from pass_server.api_error import ApiError
from pass_server.app import make_app
from pass_server.responses_chat import ChatConversion
from pass_server.responses_fields import ResponsesRequest
from pass_server.schemas import ChatRequest, CompletionRequest
from pass_server.serve_options import ServeOptions
from pass_server.tokenizing import DetokenizeRequest, TokenizeRequest
from pass_server.triton.config import SAMPLING_INPUTS, inputs
from pass_server.triton.tensors import TritonRequest, read_request

USER = [{"role": "user", "content": "a"}]
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
FUNCTIONS = [{"type": "function"} | tool["function"] for tool in TOOLS]
DRAWN: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 7,
    "stop": ["a"],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.0},
    "min_tokens": 2,
    "bad_words": ["a"],
    "allowed_token_ids": [5],
    "top_k": 3,
    "min_p": 0.1,
    "ignore_eos": True,
    "stop_token_ids": [5],
    "speculative": False,
    "plan": "fused",
    "lookahead": 1,
    "draft": "lookahead",
    "cache_salt": "s",
}
SAMPLED_TEXT = DRAWN | {
    "n": 2,
    "max_tokens": 5,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
}
CHAT = {
    "messages": [{"role": "user", "content": "b"}],
    "chat_template_kwargs": {"enable_thinking": False},
}
VALUES: dict[type, dict[str, Any]] = {
    CompletionRequest: SAMPLED_TEXT
    | {"prompt": "b", "logprobs": 2, "best_of": 2, "echo": True, "suffix": "b"},
    ChatRequest: SAMPLED_TEXT
    | CHAT
    | {"logprobs": True, "tools": TOOLS, "tool_choice": "none", "max_completion_tokens": 5}
    | {"top_logprobs": 2, "parallel_tool_calls": False},
    ResponsesRequest: DRAWN
    | {
        "input": "b",
        "instructions": "i",
        "max_output_tokens": 5,
        "metadata": {"a": "b"},
        "tools": FUNCTIONS,
    }
    | {
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_object"}},
    }
    | {"chat_template_kwargs": {"enable_thinking": False}, "reasoning": {"effort": "high"}},
    TokenizeRequest: CHAT
    | {
        "prompt": "b",
        "add_special_tokens": False,
        "return_token_strs": True,
        "tools": TOOLS,
        "messages": USER,
    },
    DetokenizeRequest: {"tokens": [6]},
}
"""A value that shows, by field."""
VALUES[TritonRequest] = VALUES[CompletionRequest]
BASES: dict[type, dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "a", "seed": 0},
    TritonRequest: {"model": "m", "prompt": "a", "seed": 0},
    ChatRequest: {"model": "m", "messages": USER, "seed": 0},
    ResponsesRequest: {"model": "m", "input": "a", "seed": 0},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [5]},
}
WITH: dict[tuple[type, str], dict[str, Any]] = {
    (ChatRequest, "top_logprobs"): {"logprobs": True},
    (ChatRequest, "tool_choice"): REQUIRED,
    (ChatRequest, "parallel_tool_calls"): REQUIRED,
    (ResponsesRequest, "tool_choice"): {"tools": FUNCTIONS, "tool_choice": "required"},
    (ResponsesRequest, "parallel_tool_calls"): {"tools": FUNCTIONS, "tool_choice": "required"},
    (TokenizeRequest, "messages"): {"prompt": None},
    (TokenizeRequest, "tools"): {"prompt": None, "messages": USER},
    (TokenizeRequest, "chat_template_kwargs"): {"prompt": None, "messages": USER},
}
"""What else the request has, where a field has a meaning only beside others."""
PATHS = {
    CompletionRequest: "/v1/completions",
    ChatRequest: "/v1/chat/completions",
    ResponsesRequest: "/v1/responses",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}
OF_ANSWERS = ("model", "stream", "stream_options", "pass_details")
"""Fields that are about the answer as a whole, which `test_fields_of_answers` asks for."""


@pytest.fixture(scope="module")
def session(random_bundle, tmp_path_factory):
    bundle = with_template(random_bundle, tmp_path_factory.mktemp("fields") / "bundle", THINKING)
    with load(bundle, LoadOptions("cpu", threads=1, max_batch_size=2)) as session:
        session.tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
        yield session


@pytest.fixture(scope="module")
def asks(session):
    """Send requests to an app over the session."""

    def ask(
        path: str, fields: Any, options: ServeOptions | None = None, **headers: str
    ) -> httpx.Response:
        async def main() -> httpx.Response:
            transport = httpx.ASGITransport(
                make_app(session, options or ServeOptions(model_name="m"))
            )
            async with httpx.AsyncClient(
                transport=transport, base_url="http://a", timeout=60
            ) as client:
                return await client.post(path, json=fields, headers=headers)

        return asyncio.run(main())

    return ask


def meaning(session, request: Any) -> Any:
    """What a request stands for: the prompts and options of its sequences, and how they are told;
    for a refusal, the field."""
    asked: list[Any] = []
    echo = None
    with pytest.MonkeyPatch.context() as patch:
        make = session.request
        patch.setattr(session, "request", lambda *given: (asked.append(given), make(*given))[1])
        try:
            if isinstance(request, ResponsesRequest):
                conversion = ChatConversion(request)
                request, echo = conversion.chat, conversion.echo
            parsed = parse(session, ServeOptions(), request, 0.0)
        except ApiError as error:
            return "refused", error.param
    return (
        asked,
        parsed.n,
        parsed.per_prompt,
        parsed.echo,
        parsed.turn_format,
        parsed.constraint_kind,
        echo,
    )


CASES = [
    (model, name)
    for model in BASES
    for name, info in model.model_fields.items()
    if name not in OF_ANSWERS or isinstance(info.json_schema_extra, dict)
]


@pytest.mark.parametrize(
    ("model", "name"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_field_shows(session, asks, model, name):
    info = model.model_fields[name]
    if (info.description or "").startswith("Not used."):
        return
    base = BASES[model] | WITH.get((model, name), {})
    neutral = isinstance(info.json_schema_extra, dict)
    value = "something else" if neutral else VALUES[model][name]
    if model in (TokenizeRequest, DetokenizeRequest):
        plain, changed = (asks(PATHS[model], fields) for fields in (base, base | {name: value}))
        assert plain.content != changed.content
        assert not neutral or changed.json()["error"]["param"] == name
        return
    plain, again, changed = (
        meaning(session, model.model_validate(fields))
        for fields in (base, base, base | {name: value})
    )
    assert plain == again
    if neutral or name in ("suffix", "reasoning"):
        assert changed[0] == "refused"
        assert changed[1].startswith(name)
    else:
        assert changed[0] != "refused"
        assert changed != plain


@pytest.mark.parametrize("path", list(PATHS.values()))
def test_fields_of_answers(asks, path):
    """The model's name; for what writes, whether and how it is streamed."""
    fields = next(BASES[model] for model in PATHS if PATHS[model] == path) | {"model": "m"}
    assert asks(path, fields | {"model": "other"}).status_code == 404
    if not path.startswith("/v1"):
        return
    fields |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 2}
    assert asks(path, fields).headers["content-type"] == "application/json"
    streamed = asks(path, fields | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    if path == "/v1/responses":
        refused = asks(
            path, fields | {"stream": True, "stream_options": {"include_obfuscation": True}}
        )
        assert refused.json()["error"]["param"] == "stream_options.include_obfuscation"
        return
    with_usage = asks(path, fields | {"stream": True, "stream_options": {"include_usage": True}})
    assert (
        '"usage":{' in streamed.text.replace(" ", ""),
        '"usage":{' in with_usage.text.replace(" ", ""),
    ) == (False, True)


TENSORS = {name: DRAWN.get(name) for name in (field.name for field in SAMPLING_INPUTS)}
TENSORS |= {"max_tokens": 5, "stop_words": ["a"]}
FLAGS = {"sampling_parameters": '{"min_tokens": 2}', "exclude_input_in_output": False}


@pytest.mark.parametrize("tokens", [False, True])
def test_an_input_of_triton_shows(session, tokens):
    """One for each tensor that a request may have."""
    dtypes = {
        "STRING": object,
        "BOOL": bool,
        "INT32": np.int32,
        "UINT64": np.uint64,
        "FP32": np.float32,
    }
    for field in inputs(tokens=tokens):
        prompt = (
            {"input_ids": np.array([5], np.int32)}
            if tokens
            else {"text_input": np.array([b"a"], object)}
        )
        seed = {"seed": np.array([0], np.uint64)}
        value = {"input_ids": [6], "text_input": "b", **TENSORS, **FLAGS}.get(field.name, True)
        values = value if isinstance(value, list) else [value]
        given = [each.encode() if isinstance(each, str) else each for each in values]
        tensor = {field.name: np.array(given, dtypes[field.dtype])}
        plain, changed = (
            read_request("m", {**seed, **prompt, **more}, "") for more in ({}, tensor)
        )
        same = meaning(session, plain[0]) == meaning(session, changed[0])
        assert not same or plain[1] != changed[1], field.name


def test_every_limit_of_a_server_is_read(session, asks):
    """The fields of ServeOptions are looked at while a server is made and answers."""
    read: set[str] = set()

    class Watched(ServeOptions):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    options = Watched(keys=("k",), model_name="m")
    read.clear()
    for model, path in PATHS.items():
        asks(path, {"model": "m"} | BASES[model], options, Authorization="Bearer k")
    asks(
        "/v1/completions",
        BASES[CompletionRequest] | {"plan": "ar"},
        options,
        Authorization="Bearer k",
    )
    assert set(ServeOptions.__dataclass_fields__) <= read
