"""Sends metrics to Triton, which shows them in its own /metrics, and logs failures that repeat."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pass_runtime import Session
from pass_server.metrics import GAUGES, RECORDED, Metric, read_gauges

log = logging.getLogger("pass_server")
LOG_INTERVAL_SECONDS = 60.0


class FailureLog:
    """Logs the failures of a loop at most once in LOG_INTERVAL_SECONDS."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Suppress an exception of the block, and log it if it is time to."""
        try:
            yield
        except Exception as error:
            if time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + LOG_INTERVAL_SECONDS
                message = "polling requests or sending metrics failed; both continue"
                log.error(message, exc_info=error)


class TritonMetricSink:
    """A `MetricSink` with a thread that sends to Triton: it crashes if two threads send at a time,
    and decoding must not wait for it."""

    def __init__(self, pb_utils: Any, instance: str) -> None:
        """instance: the label of the gauges. If Triton has no metrics, nothing is recorded."""
        self._pb_utils, self._instance = pb_utils, instance
        self._families: dict[Metric, Any] = {}
        self._labelled: dict[tuple[Metric, tuple[object, ...]], Any] = {}
        self._gauges: dict[Metric, float] = {}  # the values that were recorded last
        self._queue: queue.SimpleQueue[tuple[Metric, float, tuple[object, ...]] | None] = (
            queue.SimpleQueue()
        )
        try:
            for metric in (*RECORDED, *GAUGES.values()):
                self._families[metric] = self._family(metric)
        except pb_utils.TritonModelException:
            self._families = {}
        self._thread = threading.Thread(target=self._run, name="pass-metrics", daemon=True)
        self._thread.start()

    def record(self, metric: Metric, value: float, *labels: object) -> None:
        if self._families:
            self._queue.put((metric, value, labels))

    def update_gauges(self, session: Session, model: str) -> None:
        """Record the gauges whose values have changed."""
        for metric, value, labels in read_gauges(session):
            if self._gauges.get(metric) != value:
                self._gauges[metric] = value
                self.record(metric, value, model, *labels)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        failures = FailureLog()
        while (recorded := self._queue.get()) is not None:
            with failures.logged():  # a failure loses one value, and the thread goes on
                self._send(*recorded)

    def _send(self, metric: Metric, value: float, labels: tuple[object, ...]) -> None:
        labelled = self._with_labels(metric, labels)
        if metric.kind == "counter":
            labelled.increment(value)
        elif metric.kind == "gauge":
            labelled.set(value)
        else:
            labelled.observe(value)

    def _family(self, metric: Metric) -> Any:
        kinds = self._pb_utils.MetricFamily
        kind = {"counter": kinds.COUNTER, "gauge": kinds.GAUGE, "histogram": kinds.HISTOGRAM}[
            metric.kind
        ]
        return kinds(name=metric.name, description=metric.description, kind=kind)

    def _with_labels(self, metric: Metric, values: tuple[object, ...]) -> Any:
        if (metric, values) not in self._labelled:
            names = ("model_name", *metric.labels)
            labels = dict(zip(names, map(str, values), strict=True)) | {"instance": self._instance}
            buckets = {"buckets": list(metric.buckets)} if metric.buckets else {}
            self._labelled[metric, values] = self._families[metric].Metric(labels=labels, **buckets)
        return self._labelled[metric, values]
