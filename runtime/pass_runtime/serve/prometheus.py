"""The figures of /metrics. A registry of its own for every app."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pass_runtime.serve.metrics import COUNTED, Figure, now
from pass_runtime.session import Session

RESPONSES = Figure("counter", "pass:http_responses_total", "Responses by path and status.", ("path", "status"))


class Prometheus:
    """A `Store` of all that is counted, and the gauges of `session`."""

    def __init__(self, session: Session, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(session, model))
        self._made: dict[Figure, Counter | Histogram] = {}
        self._labelled = cache(self._with_labels)
        for figure in (*COUNTED, RESPONSES):
            names = ("model_name", *figure.labels)
            what = (figure.name, figure.told, names)
            if figure.kind == "counter":
                self._made[figure] = Counter(*what, registry=self._registry)
            else:
                self._made[figure] = Histogram(*what, registry=self._registry, buckets=figure.buckets)

    def record(self, figure: Figure, value: float, *labels: object) -> None:
        self._labelled(figure, *labels)(value)

    def _with_labels(self, figure: Figure, *labels: object) -> Callable[[float], None]:
        labelled = self._made[figure].labels(*labels)
        return labelled.inc if isinstance(labelled, Counter) else labelled.observe

    def text(self) -> bytes:
        """What /metrics says."""
        return generate_latest(self._registry)


class _Now(Collector):
    """Gauges, read from the session when somebody looks."""

    def __init__(self, session: Session, model: str) -> None:
        self._session, self._model = session, model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for figure, value in now(self._session).items():
            gauge = GaugeMetricFamily(figure.name, figure.told, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
