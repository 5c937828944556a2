"""Keeps metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pass_runtime import Session
from pass_server.metrics import HTTP_RESPONSES, RECORDED, Metric, read_gauges


class PrometheusSink(Collector):
    """A `MetricSink` that keeps counters and histograms in a Prometheus registry of its own. Gauges
    are not recorded, but read from `session` for every request to /metrics."""

    def __init__(self, session: Session, model: str) -> None:
        self._session, self._model = session, model
        self._registry = CollectorRegistry()
        self._registry.register(self)  # for the gauges
        self._families: dict[Metric, Counter | Histogram] = {}
        self._recorder = cache(self._find_recorder)
        for metric in (*RECORDED, HTTP_RESPONSES):
            arguments = (metric.name, metric.description, ("model_name", *metric.labels))
            if metric.kind == "counter":
                self._families[metric] = Counter(*arguments, registry=self._registry)
            else:
                self._families[metric] = Histogram(
                    *arguments, registry=self._registry, buckets=metric.buckets
                )

    def record(self, metric: Metric, value: float, *labels: object) -> None:
        self._recorder(metric, *labels)(value)

    def _find_recorder(self, metric: Metric, *labels: object) -> Callable[[float], None]:
        labelled = self._families[metric].labels(*labels)
        return labelled.inc if isinstance(labelled, Counter) else labelled.observe

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for metric, value, labels in read_gauges(self._session):
            names = ("model_name", *metric.labels)
            gauge = GaugeMetricFamily(metric.name, metric.description, labels=names)
            gauge.add_metric((self._model, *labels), value)
            yield gauge

    def text(self) -> bytes:
        return generate_latest(self._registry)
