"""Every field changes what its request means, or is refused by name, or documented as not used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from in_process import App, parse
from pydantic import ValidationError
from recorded_arguments import REQUEST_VALUES, SAMPLING_VALUES
from starlette.testclient import TestClient
from tokenizers.processors import TemplateProcessing
from tool_models import FUNCTIONS, THINKING, TOOLS, with_template

from pass_runtime import LoadOptions, load
from pass_server.api_error import ApiError, validation_error
from pass_server.app import make_app
from pass_server.responses_input import ChatConversion, ResponsesRequest
from pass_server.schemas import ChatRequest, CompletionRequest
from pass_server.serve_options import ServeOptions
from pass_server.tokenizing import DetokenizeRequest, TokenizeRequest
from pass_server.triton.config import SAMPLING_INPUTS, inputs
from pass_server.triton.tensors import TritonRequest, read_request

MESSAGES = [{"role": "user", "content": "a"}]
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
REQUIRED_FUNCTIONS = {"tools": FUNCTIONS, "tool_choice": "required"}
GENERATION_FIELDS = SAMPLING_VALUES | REQUEST_VALUES | {"speculative": False}
TEXT_FIELDS = GENERATION_FIELDS | {
    "n": 2,
    "max_tokens": 5,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"},
    "guided_json": {},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
}
CHAT_FIELDS = {
    "messages": [{"role": "user", "content": "b"}],
    "chat_template_kwargs": {"enable_thinking": False},
}
VALUES: dict[type, dict[str, Any]] = {
    CompletionRequest: TEXT_FIELDS
    | {"prompt": "b", "logprobs": 2, "best_of": 2, "echo": True, "suffix": "b"},
    ChatRequest: TEXT_FIELDS
    | CHAT_FIELDS
    | {"logprobs": True, "tools": TOOLS, "tool_choice": "none", "max_completion_tokens": 5}
    | {"top_logprobs": 2, "parallel_tool_calls": False},
    ResponsesRequest: GENERATION_FIELDS
    | {"input": "b", "instructions": "i", "max_output_tokens": 5, "metadata": {"a": "b"}}
    | {"tools": FUNCTIONS, "tool_choice": "none", "parallel_tool_calls": False}
    | {"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "high"}}
    | {"chat_template_kwargs": {"enable_thinking": False}},
    TokenizeRequest: CHAT_FIELDS
    | {"prompt": "b", "add_special_tokens": False, "return_token_strs": True}
    | {"tools": TOOLS, "messages": MESSAGES},
    DetokenizeRequest: {"tokens": [6]},
}
"""For every field, a value that changes the meaning of the request in BASES."""
VALUES[TritonRequest] = VALUES[CompletionRequest]
BASES: dict[type, dict[str, Any]] = {
    CompletionRequest: {"model": "m", "prompt": "a", "seed": 0},
    TritonRequest: {"model": "m", "prompt": "a", "seed": 0},
    ChatRequest: {"model": "m", "messages": MESSAGES, "seed": 0},
    ResponsesRequest: {"model": "m", "input": "a", "seed": 0},
    TokenizeRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [5]},
}
NEEDED_FIELDS: dict[tuple[type, str], dict[str, Any]] = {
    (ChatRequest, "top_logprobs"): {"logprobs": True},
    (ChatRequest, "tool_choice"): REQUIRED,
    (ChatRequest, "parallel_tool_calls"): REQUIRED,
    (ResponsesRequest, "tool_choice"): REQUIRED_FUNCTIONS,
    (ResponsesRequest, "parallel_tool_calls"): REQUIRED_FUNCTIONS,
    (TokenizeRequest, "messages"): {"prompt": None},
    (TokenizeRequest, "tools"): {"prompt": None, "messages": MESSAGES},
    (TokenizeRequest, "chat_template_kwargs"): {"prompt": None, "messages": MESSAGES},
}
"""Fields that are added to the request in BASES, if a field has a meaning only beside them."""
PATHS = {
    CompletionRequest: "/v1/completions",
    ChatRequest: "/v1/chat/completions",
    ResponsesRequest: "/v1/responses",
    TokenizeRequest: "/tokenize",
    DetokenizeRequest: "/detokenize",
}
NOT_USED = {
    "user": "me",
    "safety_identifier": "b",
    "metadata": {"a": "b"},
    "client_metadata": {"x-session": "a" * 5000},
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m", "prewarm": False},
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
}
"""Values of fields that change nothing."""
ANSWER_FIELDS = ("model", "stream", "stream_options", "pass_details")
"""Fields of the answer's form, which test_openai_client.py and test_pass_details.py test."""


@pytest.fixture(scope="module")
def session(random_bundle, tmp_path_factory):
    bundle = with_template(random_bundle, tmp_path_factory.mktemp("fields") / "bundle", THINKING)
    with load(bundle, LoadOptions("cpu", threads=1, max_batch_size=2)) as session:
        session.tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 0)]
        )
        yield session


def meaning(session, request: Any) -> Any:
    """Return the prompts and options of all sequences of a request, and what shapes its answer. If
    the request is refused, return ("refused", the field that the error names)."""
    sequences: list[Any] = []
    echo = None
    make_sequence = session.request

    def record(*arguments):
        sequences.append(arguments)
        return make_sequence(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "request", record)
        try:
            if isinstance(request, ResponsesRequest):
                conversion = ChatConversion(request)
                request, echo = conversion.chat, conversion.echo
            parsed = parse(session, ServeOptions(), request)
        except ApiError as error:
            return "refused", error.param
    shape = (parsed.n, parsed.per_prompt, parsed.echo, parsed.turn_format, parsed.constraint_kind)
    return sequences, *shape, echo


CASES = [
    (model, name)
    for model in BASES
    for name in (*model.model_fields, *model.neutral)
    if name not in ANSWER_FIELDS
]


@pytest.mark.parametrize(
    ("model", "name"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_field_changes_the_meaning_or_is_refused(session, model, name):
    unsupported = name in (*model.neutral, "reasoning")
    base = BASES[model] | NEEDED_FIELDS.get((model, name), {})
    if not unsupported and (model.model_fields[name].description or "").startswith("Not used."):
        plain, changed = (
            meaning(session, model.model_validate(fields))
            for fields in (base, base | {name: NOT_USED[name]})
        )
        assert plain == changed
        return
    if unsupported:
        with pytest.raises(ValidationError) as error:
            model.model_validate(base | {name: VALUES.get(model, {}).get(name, "something else")})
        assert validation_error(error.value).param.startswith(name)
        return
    value = VALUES[model][name]
    if model in (TokenizeRequest, DetokenizeRequest):
        app = App(session)
        plain, changed = (app.post(PATHS[model], each) for each in (base, base | {name: value}))
        assert plain.content != changed.content
        return
    plain, again, changed = (
        meaning(session, model.model_validate(fields))
        for fields in (base, base, base | {name: value})
    )
    assert plain == again
    if name == "suffix":
        assert changed[0] == "refused"
        assert changed[1].startswith(name)
    else:
        assert changed[0] != "refused"
        assert changed != plain


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest])
def test_without_speculation_the_plan_is_ar(session, model):
    plain, ar = (
        meaning(session, model.model_validate(BASES[model] | fields))
        for fields in ({"speculative": False}, {"plan": "ar"})
    )
    assert plain == ar


TENSORS = {field.name: GENERATION_FIELDS.get(field.name) for field in SAMPLING_INPUTS}
TENSORS |= {"max_tokens": 5, "stop_words": ["a"], "input_ids": [6], "text_input": "b"}
TENSORS |= {"sampling_parameters": '{"min_tokens": 2}', "exclude_input_in_output": False}
"""Values of Triton's inputs that change the meaning. True does so for all others."""


@pytest.mark.parametrize("tokens", [False, True])
def test_an_input_of_triton_changes_the_meaning(session, tokens):
    dtypes = {"STRING": object, "BOOL": bool}
    dtypes |= {"INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
    base = {"seed": np.array([0], np.uint64)}
    if tokens:
        base["input_ids"] = np.array([5], np.int32)
    else:
        base["text_input"] = np.array([b"a"], object)
    for field in inputs(tokens=tokens):
        value = TENSORS.get(field.name, True)
        values = value if isinstance(value, list) else [value]
        as_bytes = [each.encode() if isinstance(each, str) else each for each in values]
        tensor = {field.name: np.array(as_bytes, dtypes[field.dtype])}
        (plain, plain_outputs), (changed, outputs) = (
            read_request("m", base | more, "") for more in ({}, tensor)
        )
        same = meaning(session, plain) == meaning(session, changed)
        assert not same or plain_outputs != outputs, field.name


def test_every_option_of_a_server_is_read(session):
    """Making an app and answering requests reads all fields of ServeOptions."""
    read: set[str] = set()

    class Watched(ServeOptions):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    options = Watched(keys=("k",), model_name="m")
    read.clear()
    http = TestClient(make_app(session, options), headers={"Authorization": "Bearer k"})
    for model, path in PATHS.items():
        http.post(path, json={"model": "m"} | BASES[model])
    stream = BASES[CompletionRequest] | {"plan": "ar", "stream": True}
    http.post("/v1/completions", json=stream)
    assert set(ServeOptions.__dataclass_fields__) <= read
