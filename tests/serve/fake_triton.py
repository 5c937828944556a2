"""A fake of Triton's Python backend, in the process of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from metered import wait_until

from pass_server.triton.model import Model


class ModelException(Exception):
    pass


@dataclass
class TritonError:
    INVALID_ARG, NOT_FOUND, UNAVAILABLE = "INVALID_ARG", "NOT_FOUND", "UNAVAILABLE"
    INTERNAL, CANCELLED = "INTERNAL", "CANCELLED"

    message: str
    code: str


class Metric:
    """sums: of the values, by the name of the metric. fails: every metric raises an error."""

    fails = False
    sums: ClassVar[dict[str, float]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def add(self, value: float) -> None:
        if Metric.fails:
            raise ModelException("no such metric")
        Metric.sums[self.name] = Metric.sums.get(self.name, 0.0) + value

    increment = set = observe = add


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.Metric = lambda labels, buckets=(): Metric(name)


class Request:
    """A request and its answer. responses: arrays by tensor name. ended: the last response has
    come."""

    def __init__(self, **tensors: Any) -> None:
        self.tensors = {name: np.array(value) for name, value in tensors.items()}
        self.responses: list[dict[str, np.ndarray]] = []
        self.error: TritonError | None = None
        self.ended = False
        self.is_cancelled: Callable[[], bool] = lambda: False

    def get_response_sender(self) -> Request:
        return self

    def parameters(self) -> str:
        return ""

    def send(self, response: SimpleNamespace, flags: int) -> None:
        assert not self.ended
        if response.error is None:
            self.responses.append({tensor.name: tensor.array for tensor in response.output_tensors})
        self.error, self.ended = response.error, bool(flags)

    def wait_until_ended(self) -> None:
        wait_until(lambda: self.ended)


PB_UTILS = SimpleNamespace(
    TritonModelException=ModelException,
    MetricFamily=MetricFamily,
    Tensor=lambda name, array: SimpleNamespace(name=name, array=array),
    TritonError=TritonError,
    InferenceResponse=lambda output_tensors=(), error=None: SimpleNamespace(
        output_tensors=output_tensors, error=error
    ),
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    get_input_tensor_by_name=lambda request, name: (
        SimpleNamespace(as_numpy=lambda: request.tensors[name]) if name in request.tensors else None
    ),
)


@contextmanager
def model_of(bundle: Path, directory: Path, **parameters: object) -> Iterator[Model]:
    """Give a loaded text model. parameters: its own, and those of its instance
    (model_instance...)."""
    (directory / "1").mkdir(parents=True)
    names = {name for name in parameters if name.startswith("model_instance")}
    instance = {name: str(parameters.pop(name)) for name in names}
    values = {"bundle": str(bundle), "device": "cpu", "threads": 1} | parameters
    config = {"parameters": {name: {"string_value": str(value)} for name, value in values.items()}}
    arguments = {"model_name": "m", "model_version": "1", "model_repository": str(directory)}
    arguments |= {"model_instance_name": "m_0_0", "model_instance_kind": "CPU"} | instance
    Metric.fails, Metric.sums = False, {}
    model = Model()
    model.pb_utils = PB_UTILS
    model.initialize(arguments | {"model_config": json.dumps(config)})
    try:
        yield model
    finally:
        model.finalize()
