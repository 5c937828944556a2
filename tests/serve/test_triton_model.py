"""What a model does where things go wrong around it, without Triton."""

from __future__ import annotations

import time

import numpy as np
import pytest
from fake_triton import Metric, Request, model_of, wait_until

from pass_runtime import GenerateOptions
from pass_runtime.backends.base import Backend

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
    """Neither for other requests nor for the same one; and it is told once, not fifty times a second."""
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
    assert caplog.text.count("looking after requests failed") == 1


def test_a_figure_that_fails_is_not_the_last_one(random_bundle, tmp_path, session):
    with model_of(random_bundle, tmp_path / "model") as model:
        Metric.fails = True
        first, second = request(5), request(5)
        model.execute([first])
        first.wait_until_ended()
        wait_until(lambda: model._figures._told.empty())
        Metric.fails = False
        model.execute([second])
        second.wait_until_ended()
    assert Metric.sums["vllm:generation_tokens_total"] == 5
    text = b"".join(response["text_output"][0] for response in second.responses).decode()
    assert text == session.generate("The quick", GenerateOptions(max_new_tokens=5, ignore_eos=True)).run().text
