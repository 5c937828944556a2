"""Reading the tensors, parameters and configuration of Triton's models, without Triton."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pass_runtime import PassError
from pass_server.api_error import ApiError
from pass_server.triton.config import read_settings
from pass_server.triton.tensors import read_request

STREAM_WITH_INPUT = {"exclude_input_in_output": np.array([False]), "stream": np.array([True])}
TEXT = {"text_input": np.array([b"The"], object)}


def read(parameters: str = "", **tensors: np.ndarray):
    return read_request("m", TEXT | tensors, parameters)


def test_fp32_numbers_are_read_as_their_shortest_decimals():
    seed = np.array([2**64 - 1], np.uint64)
    request, _ = read(temperature=np.array([0.8], np.float32), seed=seed)
    assert (request.temperature, request.seed) == (0.8, 2**64 - 1)


def test_parameters_of_a_request_are_sampling_parameters():
    """Except those that Triton itself adds, whose names begin with triton_."""
    request, outputs = read('{"max_tokens": 7, "triton_enable_empty_final_response": true}')
    assert request.max_tokens == 7
    assert not outputs.stream
    assert read('{"max_tokens": 7}', max_tokens=np.array([7], np.int32))[0].max_tokens == 7
    read('{"n": 1.0}')  # which is 1


@pytest.mark.parametrize(
    ("sampling", "logprobs"),
    [
        ("{}", None),
        ('{"logprobs": 3}', 3),
        ('{"logprobs": true, "top_logprobs": 2}', 2),
        ('{"logprobs": false}', None),
    ],
)
def test_logprobs_of_completions_and_of_chats(sampling, logprobs):
    request, _ = read(sampling_parameters=np.array([sampling.encode()], object))
    assert request.logprobs == logprobs


def test_returning_logprobs_asks_for_them():
    request, outputs = read(return_logprobs=np.array([True]))
    assert (request.logprobs, outputs.returned) == (0, {"return_logprobs"})


@pytest.mark.parametrize(
    ("tensors", "parameters", "param"),
    [
        ({"text_input": np.array([b"\xff"], object)}, "", "text_input"),
        ({"max_tokens": np.array([1, 2], np.int32)}, "", "max_tokens"),
        ({"temperature": np.array([np.nan], np.float32)}, "", "temperature"),
        ({"top_k": np.array([-2], np.int32)}, "", "top_k"),
        ({"max_tokens": np.array([4], np.int32)}, '{"max_tokens": 3}', "max_tokens"),
        ({}, "{", "sampling_parameters"),
        ({}, '{"prompt": "another"}', "prompt"),
        ({}, '{"model": "another"}', "model"),
        ({}, "[" * 100_000, "sampling_parameters"),
        ({}, '{"top_logprobs": 3}', "top_logprobs"),
        ({}, '{"logprobs": 2, "top_logprobs": 3}', "top_logprobs"),
        (STREAM_WITH_INPUT, "", "exclude_input_in_output"),
    ],
)
def test_wrong_inputs_are_refused(tensors, parameters, param):
    with pytest.raises(ApiError) as caught:
        read(parameters, **tensors)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "no parameter `bundle`"),
        ({"bundle": "b", "max_batch": "4"}, "unknown parameter 'max_batch'"),
        ({"bundle": "b", "max_batch_size": "many"}, "max_batch_size must be a int"),
        ({"bundle": "b", "reuse_prefix": "1"}, "reuse_prefix must be a bool"),
        ({"bundle": "b", "max_queue": "-1"}, "max-queue"),
    ],
)
def test_wrong_settings_are_refused(parameters, message):
    with pytest.raises(PassError, match=message):
        read_settings(parameters)


def test_a_model_imports_nothing_of_the_extra_serve():
    code = "import pass_server.triton.model, sys; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"fastapi", "starlette", "uvicorn", "prometheus_client", "httpx"} & set(modules)
