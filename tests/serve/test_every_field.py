"""Every field of a request changes its meaning, or is refused by name, or documented as unused."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from parsing import parse
from starlette.testclient import TestClient
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
SAMPLED: dict[str, Any] = {
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
SAMPLED_TEXT = SAMPLED | {
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
    ResponsesRequest: SAMPLED
    | {"input": "b", "instructions": "i", "max_output_tokens": 5, "metadata": {"a": "b"}}
    | {"tools": FUNCTIONS, "tool_choice": "none", "parallel_tool_calls": False}
    | {"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "high"}}
    | {"chat_template_kwargs": {"enable_thinking": False}},
    TokenizeRequest: CHAT
    | {"prompt": "b", "add_special_tokens": False, "return_token_strs": True}
    | {"tools": TOOLS, "messages": USER},
    DetokenizeRequest: {"tokens": [6]},
}
"""For every field, a value that changes the meaning of the base request."""
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
"""Other fields that the base request needs, where a field has a meaning only beside them."""
PATHS = {
    CompletionRequest: "/v1/completions",
    ChatRequest: "/v1/chat/completions",
    ResponsesRequest: "/v1/responses",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}
OF_ANSWERS = ("model", "stream", "stream_options", "pass_details")
"""Fields about the answer as a whole: see `test_fields_of_answers` and test_pass_details.py."""


@pytest.fixture(scope="module")
def session(random_bundle, tmp_path_factory):
    bundle = with_template(random_bundle, tmp_path_factory.mktemp("fields") / "bundle", THINKING)
    with load(bundle, LoadOptions("cpu", threads=1, max_batch_size=2)) as session:
        session.tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
        yield session


@pytest.fixture(scope="module")
def send(session):
    """Return a function that sends a request to an app over the session."""

    def send(
        path: str, fields: Any, options: ServeOptions | None = None, **headers: str
    ) -> httpx.Response:
        app = make_app(session, options or ServeOptions(model_name="m"))
        return TestClient(app).post(path, json=fields, headers=headers)

    return send


def meaning(session, request: Any) -> Any:
    """Return the prompts and options that a request stands for, and what shapes its answer; of a
    request that is refused, ("refused", field)."""
    sequences: list[Any] = []
    echo = None
    with pytest.MonkeyPatch.context() as patch:
        make = session.request
        patch.setattr(session, "request", lambda *given: (sequences.append(given), make(*given))[1])
        try:
            if isinstance(request, ResponsesRequest):
                conversion = ChatConversion(request)
                request, echo = conversion.chat, conversion.echo
            parsed = parse(session, ServeOptions(), request, 0.0)
        except ApiError as error:
            return "refused", error.param
    shape = (parsed.n, parsed.per_prompt, parsed.echo, parsed.turn_format, parsed.constraint_kind)
    return sequences, *shape, echo


CASES = [
    (model, name)
    for model in BASES
    for name, info in model.model_fields.items()
    if name not in OF_ANSWERS or isinstance(info.json_schema_extra, dict)
]


@pytest.mark.parametrize(
    ("model", "name"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_field_changes_the_meaning(session, send, model, name):
    info = model.model_fields[name]
    if (info.description or "").startswith("Not used."):
        return
    base = BASES[model] | WITH.get((model, name), {})
    neutral = isinstance(info.json_schema_extra, dict)
    value = "something else" if neutral else VALUES[model][name]
    if model in (TokenizeRequest, DetokenizeRequest):
        plain, changed = (send(PATHS[model], fields) for fields in (base, base | {name: value}))
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
def test_fields_of_answers(send, path):
    """The model's name has to be right; `stream` and `stream_options` say how text is sent."""
    fields = next(BASES[model] for model in PATHS if PATHS[model] == path) | {"model": "m"}
    assert send(path, fields | {"model": "other"}).status_code == 404
    if not path.startswith("/v1"):
        return
    fields |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 2}
    assert send(path, fields).headers["content-type"] == "application/json"
    streamed = send(path, fields | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    if path == "/v1/responses":
        options = {"include_obfuscation": True}
        refused = send(path, fields | {"stream": True, "stream_options": options})
        assert refused.json()["error"]["param"] == "stream_options.include_obfuscation"
        return
    with_usage = send(path, fields | {"stream": True, "stream_options": {"include_usage": True}})
    assert '"usage":{' not in streamed.text.replace(" ", "")
    assert '"usage":{' in with_usage.text.replace(" ", "")


TENSORS = {name: SAMPLED.get(name) for name in (field.name for field in SAMPLING_INPUTS)}
TENSORS |= {"max_tokens": 5, "stop_words": ["a"]}
FLAGS = {"sampling_parameters": '{"min_tokens": 2}', "exclude_input_in_output": False}


@pytest.mark.parametrize("tokens", [False, True])
def test_an_input_of_triton_changes_the_meaning(session, tokens):
    dtypes = {"STRING": object, "BOOL": bool}
    dtypes |= {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
    ids, text = {"input_ids": np.array([5], np.int32)}, {"text_input": np.array([b"a"], object)}
    for field in inputs(tokens=tokens):
        prompt = ids if tokens else text
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


def test_every_limit_of_a_server_is_read(session, send):
    """Making a server and answering requests reads all fields of ServeOptions."""
    read: set[str] = set()

    class Watched(ServeOptions):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    options, key = Watched(keys=("k",), model_name="m"), {"Authorization": "Bearer k"}
    read.clear()
    for model, path in PATHS.items():
        send(path, {"model": "m"} | BASES[model], options, **key)
    stream = BASES[CompletionRequest] | {"plan": "ar", "stream": True}
    send("/v1/completions", stream, options, **key)
    assert set(ServeOptions.__dataclass_fields__) <= read
