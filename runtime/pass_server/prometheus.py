"""The metrics of /metrics. Every app has a Prometheus registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pass_runtime import Session
from pass_server.metrics import RECORDED, Metric, read_gauges

HTTP_RESPONSES = Metric(
    "counter", "pass:http_responses_total", "Responses by path and status.", ("path", "status")
)


class PrometheusSink:
    """A `MetricSink` for counters and histograms; the gauges are those of `session`."""

    def __init__(self, session: Session, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(session, model))
        self._families: dict[Metric, Counter | Histogram] = {}
        self._labelled = cache(self._with_labels)
        for metric in (*RECORDED, HTTP_RESPONSES):
            described = (metric.name, metric.description, ("model_name", *metric.labels))
            if metric.kind == "counter":
                self._families[metric] = Counter(*described, registry=self._registry)
            else:
                self._families[metric] = Histogram(
                    *described, registry=self._registry, buckets=metric.buckets
                )

    def record(self, metric: Metric, value: float, *labels: object) -> None:
        self._labelled(metric, *labels)(value)

    def _with_labels(self, metric: Metric, *labels: object) -> Callable[[float], None]:
        labelled = self._families[metric].labels(*labels)
        return labelled.inc if isinstance(labelled, Counter) else labelled.observe

    def text(self) -> bytes:
        """The body of /metrics."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    """Gauges, which are read from the session for every request to /metrics."""

    def __init__(self, session: Session, model: str) -> None:
        self._session, self._model = session, model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for metric, value in read_gauges(self._session).items():
            gauge = GaugeMetricFamily(metric.name, metric.description, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
