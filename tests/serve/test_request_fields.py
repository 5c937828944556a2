"""The table of a sampling's fields: every door has its fields, bounds and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pass_runtime import GenerateOptions, PassError, SamplingParams, options_of
from pass_runtime.cli.batch_session import line_options
from pass_runtime.cli.flags import generate_options
from pass_runtime.cli.main import main
from pass_server.api_error import ApiError
from pass_server.request import _options
from pass_server.responses_input import ChatConversion, ResponsesRequest
from pass_server.schemas import HTTP_BOUNDS, ChatRequest, CompletionRequest
from pass_server.triton.tensors import read_request

ROOT = Path(__file__).parents[2]
FIELDS = options_of(SamplingParams)


def by_python(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: {5: value} if name == "logit_bias" else value})


def by_flag(name: str, value: Any) -> SamplingParams:
    line = ["bundle", FIELDS[name].flag, f"5={value}" if name == "logit_bias" else str(value)]
    return generate_options(
        main.commands["generate"].make_context("generate", line).params
    ).sampling


def by_line(name: str, value: Any) -> SamplingParams:
    line = {"prompt": "a", name: {"5": value} if name == "logit_bias" else value}
    return line_options(line, GenerateOptions(), 1).sampling


def by_http(name: str, value: Any) -> SamplingParams:
    fields = {"model": "m", name: {"5": value} if name == "logit_bias" else value}
    chat = ChatRequest.model_validate(fields | {"messages": [{"role": "user", "content": "a"}]})
    responses = ChatConversion(ResponsesRequest.model_validate(fields | {"input": "a"})).chat
    completion = CompletionRequest.model_validate(fields | {"prompt": "a"})
    made = [_options(request, None, "").sampling for request in (chat, responses, completion)]
    assert made[0] == made[1] == made[2]
    return made[0]


def by_triton(name: str, value: Any) -> SamplingParams:
    tensors = {"text_input": np.array([b"a"], object)}
    fields = {name: {"5": value} if name == "logit_bias" else value}
    return _options(read_request("m", tensors, json.dumps(fields))[0], None, "").sampling


DOORS = [by_python, by_flag, by_line, by_http, by_triton]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", FIELDS)
def test_every_door_has_the_bounds_of_the_table(name, door):
    """But for the HTTP API's own bounds of temperature and seed."""
    field, step = FIELDS[name], 1 if FIELDS[name].type is int else 0.5
    bounds = dict(field.bounds)
    if door in (by_http, by_triton):
        own = HTTP_BOUNDS.get(name, {})
        bounds |= {key: bound for key, bound in own.items() if key in ("ge", "le")}
    if "lt" in bounds:
        bounds["le"] = bounds.pop("lt") - 1
    for key, bound in bounds.items():
        with pytest.raises((PassError, ApiError, ValueError)) as error:
            door(name, bound - step if key == "ge" else bound + step)
        if door is by_python:
            assert str(error.value).startswith(f"{field.label} must be {field.allowed}, not ")
        taken = getattr(door(name, bound), name)
        assert name == "seed" or taken == getattr(by_python(name, bound), name)


def test_top_k_minus_1_and_top_p_0_are_taken_by_every_door():
    for door in DOORS:
        assert door("top_k", -1).top_k == 0
        assert door("top_p", 0).sampler == "greedy"
        assert door("top_p", 0).resolved().temperature == 0


def test_the_generated_header_and_table_are_current(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import field_tables

    advice = "run: python scripts/field_tables.py"
    assert field_tables.HEADER.read_text(encoding="utf-8") == field_tables.header(), advice
    docs = field_tables.DOCS.read_text(encoding="utf-8")
    assert field_tables.docs(docs) == docs and "`min_p`" in docs, advice
