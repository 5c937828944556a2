"""A model of Triton's Python backend without Triton: what it reads, what docs/triton.md says of it,
and failures that a fake of Triton can cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from fake_triton import Metric, Request, model_of
from hypothesis import given
from hypothesis import strategies as st
from metered import wait_until
from replacing import copy_bundle, write_into

from pass_exporter.cli import main
from pass_runtime import GenerateOptions, LoadOptions, PassError, load
from pass_runtime.backends.base import Backend
from pass_server.api_error import ApiError
from pass_server.metrics import GAUGES, RECORDED
from pass_server.serve_options import ServeOptions
from pass_server.triton.config import PARAMETERS, inputs, outputs, read_settings
from pass_server.triton.model import Model, visible_device
from pass_server.triton.tensors import read_request

PAGE, SERVING_PAGE = (
    (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8")
    for name in ("triton.md", "serving.md")
)

FIELDS = {
    "text_input": [b"The quick"],
    "temperature": np.array([0.0], np.float32),
    "stream": [True],
}


def request(tokens: int) -> Request:
    return Request(**FIELDS, max_tokens=np.array([tokens], np.int32), ignore_eos=[True])


def fail() -> bool:
    raise RuntimeError("Triton has no answer")


@pytest.fixture
def slow_passes(monkeypatch):
    run = Backend.run
    monkeypatch.setattr(Backend, "run", lambda *arguments: (time.sleep(0.02), run(*arguments))[1])


@pytest.mark.usefixtures("slow_passes")
def test_polling_for_cancellations_goes_on_after_an_error(random_bundle, tmp_path, session, caplog):
    """The error is logged once."""
    with model_of(random_bundle, tmp_path / "model", max_batch_size=2) as model:
        failing, other = request(600), request(600)
        failing.is_cancelled = fail
        model.execute([failing, other])
        wait_until(lambda: len(failing.responses) > 3)
        other.is_cancelled = lambda: True
        other.wait_until_ended()
        assert other.error.code == "CANCELLED"
        assert not failing.ended
        failing.is_cancelled = lambda: True
        failing.wait_until_ended()
        assert failing.error.code == "CANCELLED"
    assert caplog.text.count("polling requests or sending metrics failed") == 1


def test_metrics_and_answers_go_on_after_an_error(random_bundle, tmp_path, session):
    with model_of(random_bundle, tmp_path / "model") as model:
        Metric.fails = True
        first, second = request(5), request(5)
        model.execute([first])
        first.wait_until_ended()
        wait_until(lambda: model._sink._queue.empty())
        Metric.fails = False
        model.execute([second])
        second.wait_until_ended()
    assert Metric.sums["vllm:generation_tokens_total"] == 5
    text = b"".join(response["text_output"][0] for response in second.responses).decode()
    options = GenerateOptions(max_new_tokens=5, ignore_eos=True)
    assert text == session.generate("The quick", options).result().text


def test_a_request_that_is_cancelled_before_it_begins_is_ended(
    random_bundle, tmp_path, monkeypatch
):
    """Triton waits for a last response of every request."""
    begin = Model._begin

    def begin_and_cancel(model, *arguments):
        begin(model, *arguments)
        for task in model._senders:
            task.cancel()

    monkeypatch.setattr(Model, "_begin", begin_and_cancel)
    with model_of(random_bundle, tmp_path / "model") as model:
        cancelled = request(5)
        model.execute([cancelled])
        cancelled.wait_until_ended()
        assert cancelled.error.code == "CANCELLED"
        assert not model._senders


def test_a_model_whose_bundle_was_written_is_not_ready_and_asks_to_be_loaded_again(
    random_bundle, tmp_path
):
    """By changing a file beside it."""
    bundle, crashes = copy_bundle(random_bundle, tmp_path), tmp_path / "model" / "1" / "crashes.log"
    with model_of(bundle, tmp_path / "model") as model:
        assert model.is_ready() and not crashes.exists()
        write_into(bundle / "trunk.onnx.data")
        assert not model.is_ready()
        refused = request(5)
        model.execute([refused])
        refused.wait_until_ended()
        assert refused.error.code == "UNAVAILABLE"
        assert refused.error.message.startswith("the bundle has changed")
        wait_until(crashes.exists)
    assert len(crashes.read_text().splitlines()) == 1


def send_sigterm() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    assert handler is not signal.SIG_DFL, "the signal would end the tests"
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.usefixtures("slow_passes")
@pytest.mark.parametrize(
    ("drain_seconds", "signals", "cut_off"), [(20, 1, False), (0.3, 1, True), (60, 2, True)]
)
def test_after_sigterm_answers_may_finish_within_drain_seconds(
    random_bundle, tmp_path, drain_seconds, signals, cut_off
):
    handler = signal.getsignal(signal.SIGTERM)
    refusal = ("UNAVAILABLE", "the server is shutting down")
    parameters = {"drain_seconds": drain_seconds, "max_batch_size": 2}
    with model_of(random_bundle, tmp_path / "model", **parameters) as model:
        running, late = request(600 if cut_off else 30), request(5)
        model.execute([running])
        wait_until(lambda: len(running.responses) > 3)
        send_sigterm()
        wait_until(lambda: model._service.draining)
        model.execute([late])
        late.wait_until_ended()
        assert (late.error.code, late.error.message) == refusal
        assert not running.ended
        for _ in range(signals - 1):
            send_sigterm()
        running.wait_until_ended()
        if cut_off:
            assert (running.error.code, running.error.message) == refusal
        else:
            assert running.error is None
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(
    ("listed", "number", "visible"),
    [
        (None, "1", "1"),
        ("", "1", "1"),
        ("3, 5", "1", "5"),
        ("GPU-8f2c,GPU-41aa", "0", "GPU-8f2c"),
        ("3", "1", "1"),
    ],
)
def test_a_model_sees_the_gpu_that_triton_means(monkeypatch, listed, number, visible):
    """number: among the GPUs that CUDA_VISIBLE_DEVICES lists."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_device(number) == visible


def test_a_model_on_a_gpu_sees_no_other(random_bundle, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    instance = {"model_instance_kind": "GPU", "model_instance_device_id": "1"}
    with model_of(random_bundle, tmp_path / "model", **instance):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


LOAD_PARAMETERS = {"device": "cpu", "threads": 2, "capacity": 64, "max_batch_size": 2}
LOAD_PARAMETERS |= {"speculative_max_concurrency": 3, "logprobs_mode": "processed"}
LOAD_PARAMETERS |= {"prefix_cache": False}
SERVE_PARAMETERS = {"max_queue": 3, "max_prompt_tokens": 4, "max_output_tokens": 5}
SERVE_PARAMETERS |= {"request_seconds": 6.0, "reuse_prefix": True}


def test_every_parameter_reaches_what_it_changes(random_bundle, tmp_path, monkeypatch):
    assert {*LOAD_PARAMETERS, *SERVE_PARAMETERS, "drain_seconds"} == PARAMETERS.keys()
    load_options, drained = [], []

    def load_and_record(path, options):
        load_options.append(options)
        return load(path, "cpu")

    async def drain(seconds):
        drained.append(seconds)

    monkeypatch.setattr("pass_server.triton.model.load", load_and_record)
    with model_of(
        random_bundle, tmp_path / "model", **LOAD_PARAMETERS, **SERVE_PARAMETERS, drain_seconds=7
    ) as model:
        assert model._service.options == ServeOptions(**SERVE_PARAMETERS)
        monkeypatch.setattr(model._service, "drain", drain)
        model._loop.call_soon_threadsafe(model._drain)
        wait_until(lambda: drained)
        monkeypatch.undo()
    assert load_options == [LoadOptions(**LOAD_PARAMETERS)]
    assert drained == [7.0]


STREAM_WITH_INPUT = {"exclude_input_in_output": np.array([False]), "stream": np.array([True])}
TEXT = {"text_input": np.array([b"The"], object)}


def read(parameters: str = "", **tensors: np.ndarray):
    return read_request("m", TEXT | tensors, parameters)


def array(value: object, dtype: type = object) -> np.ndarray:
    return np.array([value], dtype)


READ = [  # tensors, parameters, fields of the request
    ({"temperature": array(0.8, np.float32)}, "", {"temperature": 0.8}),  # its shortest decimal
    ({"seed": array(2**64 - 1, np.uint64)}, "", {"seed": 2**64 - 1}),
    ({}, '{"max_tokens": 7, "triton_enable_empty_final_response": true}', {"max_tokens": 7}),
    ({"max_tokens": array(7, np.int32)}, '{"max_tokens": 7}', {"max_tokens": 7}),
    ({}, '{"n": 1.0}', {"n": None}),  # one is as if absent
    ({"sampling_parameters": array(b"{}")}, "", {"logprobs": None}),
    ({"sampling_parameters": array(b'{"logprobs": 3}')}, "", {"logprobs": 3}),
    ({"sampling_parameters": array(b'{"logprobs": true, "top_logprobs": 2}')}, "", {"logprobs": 2}),
    ({"sampling_parameters": array(b'{"logprobs": false}')}, "", {"logprobs": None}),
    ({"return_logprobs": array(True, bool)}, "", {"logprobs": 0}),
]


@pytest.mark.parametrize(("tensors", "parameters", "fields"), READ)
def test_tensors_and_parameters_become_fields_of_a_request(tensors, parameters, fields):
    request, outputs = read(parameters, **tensors)
    assert {name: getattr(request, name) for name in fields} == fields
    assert outputs.returned == {"return_logprobs"} & tensors.keys()
    assert not outputs.stream


@pytest.mark.parametrize(
    ("tensors", "parameters", "param"),
    [
        ({"text_input": array(b"\xff")}, "", "text_input"),
        ({"max_tokens": np.array([1, 2], np.int32)}, "", "max_tokens"),
        ({"temperature": array(np.nan, np.float32)}, "", "temperature"),
        ({"top_k": array(-2, np.int32)}, "", "top_k"),
        ({"max_tokens": array(4, np.int32)}, '{"max_tokens": 3}', "max_tokens"),
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


JUNK = ["", "\x00", "🦊" * 50, "{", "[]", "null", '{"a": ' * 2000, "9" * 5000, "NaN", "-1"]
JUNK.append('{"temperature": 1e999}')
VALUES = {
    "BOOL": st.booleans(),
    "INT32": st.integers(-(2**31), 2**31 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
    "FP32": st.floats(width=32),
    "STRING": st.sampled_from(JUNK).map(str.encode) | st.binary(max_size=40),
}
DTYPES = {"BOOL": bool, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        field.name: st.lists(VALUES[field.dtype], max_size=3).map(
            partial(np.array, dtype=DTYPES.get(field.dtype, object))
        )
        for tokens in (False, True)
        for field in inputs(tokens=tokens)
    },
)


@given(TENSORS, st.sampled_from(["", "{}", *JUNK]))
def test_random_tensors_are_read_or_refused(tensors, parameters):
    try:
        read(parameters, **tensors)
    except ApiError as error:
        assert error.status == 400


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


def first_column(heading: str) -> set[str]:
    rows = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([\w:.-]+)", row.split(" | ")[0])}


def test_the_page_lists_all_flags_and_parameters():
    flags = {name for name in first_column("flag") if name.startswith("--")}
    printed = CliRunner().invoke(main, ["triton", "--help"]).output
    options = set(re.findall(r"(?m)^\s+(?:-o, )?(--[a-z-]+)(?:, | / | |$)", printed))
    options -= {"--output", "--force", "--help"}
    assert {"--text", "--reference"} <= flags
    opposites = {"--tokens", "--copy"}  # of --text and --reference, which the page lists
    assert flags - opposites == options - opposites
    documented = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}
    assert set(PARAMETERS) <= documented


def test_the_page_lists_all_inputs_and_outputs():
    """The inputs `return_NAME` are not listed, but documented with the outputs `NAME`."""
    accepted = {field.name for tokens in (False, True) for field in inputs(tokens=tokens)}
    returned = {field.name for tokens in (False, True) for field in outputs(tokens=tokens)}
    flags = {name for name in accepted if name.startswith("return_")}
    assert accepted - first_column("input") == flags - {"return_finish_reason"}
    assert first_column("output") == returned
    assert flags <= {f"return_{name}" for name in returned}


def test_the_page_links_to_the_table_of_all_metrics():
    """The table in docs/serving.md is that of the HTTP server, too (test_serving_page.py)."""
    assert "(serving.md#metrics)" in PAGE and "`pass:http_responses_total`" in PAGE
    names = [metric.name for metric in (*RECORDED, *GAUGES.values())]
    assert [name for name in names if name not in SERVING_PAGE] == []
