"""A model of Triton's Python backend, among failures that a fake of Triton can cause."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from fake_triton import Metric, Request, model_of, wait_until
from replacing import copy_bundle, write_into

from pass_runtime import GenerateOptions, LoadOptions, load
from pass_runtime.backends.base import Backend
from pass_server.serve_options import ServeOptions
from pass_server.triton.config import PARAMETERS
from pass_server.triton.model import Model, visible_device

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
def test_a_model_sees_the_gpu_that_triton_means(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, number: str, visible: str
):
    """number: among the GPUs that CUDA_VISIBLE_DEVICES lists."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_device(number) == visible


def test_a_model_on_a_gpu_sees_no_other(random_bundle, tmp_path, monkeypatch: pytest.MonkeyPatch):
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
