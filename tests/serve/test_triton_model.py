"""What a model does where things go wrong around it, without Triton."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from fake_triton import Metric, Request, model_of, wait_until

from pass_runtime import GenerateOptions, LoadOptions, load
from pass_runtime.backends.base import Backend
from pass_server.serve_options import ServeOptions
from pass_server.triton.config import PARAMETER_TYPES
from pass_server.triton.model import Model, visible_device

ASKED = {"text_input": [b"The quick"], "temperature": np.array([0.0], np.float32), "stream": [True]}


def request(tokens: int) -> Request:
    return Request(**ASKED, max_tokens=np.array([tokens], np.int32), ignore_eos=[True])


def fail() -> bool:
    raise RuntimeError("Triton has no answer")


@pytest.fixture
def slow_passes(monkeypatch):
    run = Backend.run
    monkeypatch.setattr(Backend, "run", lambda *arguments: (time.sleep(0.02), run(*arguments))[1])


@pytest.mark.usefixtures("slow_passes")
def test_a_look_that_fails_is_not_the_last_one(random_bundle, tmp_path, session, caplog):
    """Neither for other requests nor for the same one; and it is logged once, not fifty times a
    second."""
    with model_of(random_bundle, tmp_path / "model", max_batch_size=2) as model:
        odd, other = request(600), request(600)
        odd.is_cancelled = fail
        model.execute([odd, other])
        wait_until(lambda: len(odd.responses) > 3)
        other.is_cancelled = lambda: True
        other.wait_until_ended()
        assert other.error.code == "CANCELLED"
        assert not odd.ended
        odd.is_cancelled = lambda: True
        odd.wait_until_ended()
        assert odd.error.code == "CANCELLED"
    assert caplog.text.count("polling requests or sending metrics failed") == 1


def test_a_figure_that_fails_is_not_the_last_one(random_bundle, tmp_path, session):
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
    assert (
        text
        == session.generate("The quick", GenerateOptions(max_new_tokens=5, ignore_eos=True))
        .result()
        .text
    )


def test_a_request_that_is_cancelled_before_it_begins_is_ended(
    random_bundle, tmp_path, monkeypatch
):
    """Triton waits for the last response of every request."""
    begin = Model._begin

    def begin_and_cancel(model, *arguments):
        begin(model, *arguments)
        for task in model._senders:
            task.cancel()

    monkeypatch.setattr(Model, "_begin", begin_and_cancel)
    with model_of(random_bundle, tmp_path / "model") as model:
        gone = request(5)
        model.execute([gone])
        gone.wait_until_ended()
        assert gone.error.code == "CANCELLED"
        assert not model._senders


def test_n_of_one_may_be_any_kind_of_number(random_bundle, tmp_path):
    with model_of(random_bundle, tmp_path / "model") as model:
        one = request(5)
        one.tensors["sampling_parameters"] = np.array([b'{"n": 1.0}'], object)
        model.execute([one])
        one.wait_until_ended()
        assert one.error is None


def ask_it_to_end() -> None:
    assert (
        signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    )  # that would be the end of these tests
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("slow_passes")
@pytest.mark.parametrize(
    ("drain_seconds", "signals", "cut_off"), [(20, 1, False), (0.3, 1, True), (60, 2, True)]
)
def test_a_signal_lets_answers_finish_or_fails_them(
    random_bundle, tmp_path, drain_seconds, signals, cut_off
):
    """Those that take longer than they may, or that a second signal finds. New ones are refused at
    once."""
    before = signal.getsignal(signal.SIGTERM)
    with model_of(
        random_bundle, tmp_path / "model", drain_seconds=drain_seconds, max_batch_size=2
    ) as model:
        running, late = request(600 if cut_off else 30), request(5)
        model.execute([running])
        wait_until(lambda: len(running.responses) > 3)
        ask_it_to_end()
        wait_until(lambda: model._service.draining)
        model.execute([late])
        late.wait_until_ended()
        assert (late.error.code, late.error.message) == (
            "UNAVAILABLE",
            "the server is shutting down",
        )
        assert not running.ended
        for _ in range(signals - 1):
            ask_it_to_end()
        running.wait_until_ended()
        if cut_off:
            assert (running.error.code, running.error.message) == (
                "UNAVAILABLE",
                "the server is shutting down",
            )
        else:
            assert running.error is None
    assert signal.getsignal(signal.SIGTERM) is before


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
    """Triton's GPU 1 is the second of those that it was given, which need not be GPU 1 of the
    machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_device(number) == visible


def test_a_model_on_a_gpu_sees_no_other(random_bundle, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with model_of(
        random_bundle, tmp_path / "model", model_instance_kind="GPU", model_instance_device_id="1"
    ):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


OPENED = {
    **{
        "speculative_max_concurrency": 3,
        "prefix_cache": False,
        "capacity": 64,
        "logprobs_mode": "processed",
    },
    **{"weight_cache": False, "max_batch_size": 2, "threads": 2, "device": "cpu"},
}
LIMITED = {
    "max_queue": 3,
    "max_prompt_tokens": 4,
    "max_output_tokens": 5,
    "request_seconds": 6.0,
    "reuse_prefix": True,
}


def test_every_parameter_reaches_what_it_changes(random_bundle, tmp_path, monkeypatch):
    """`LoadOptions` and the limits are handed on whole."""
    assert {*OPENED, *LIMITED, "drain_seconds"} == PARAMETER_TYPES.keys()
    opened = []

    def load_noted(path, options):
        opened.append(options)
        return load(path, "cpu")

    monkeypatch.setattr("pass_server.triton.model.load", load_noted)
    with model_of(random_bundle, tmp_path / "model", **OPENED, **LIMITED, drain_seconds=7) as model:
        assert model._service.options == ServeOptions(**LIMITED)
        drained = []
        monkeypatch.setattr(model._service, "drain", lambda seconds: noted(drained, seconds))
        model._loop.call_soon_threadsafe(model._drain)
        wait_until(lambda: drained)
        monkeypatch.undo()
    assert opened == [LoadOptions(**OPENED)]
    assert drained == [7.0]


async def noted(found, value):
    found.append(value)
