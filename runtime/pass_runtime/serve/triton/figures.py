"""Figures in Triton's own /metrics."""

from __future__ import annotations

import queue
import threading
from typing import Any

from pass_runtime.serve.metrics import COUNTED, GAUGES, Figure, now
from pass_runtime.serve.triton.troubles import Troubles
from pass_runtime.session import Session


class TritonFigures:
    """A `Store`. One thread does all the telling: each figure is a message to the server, which crashes where two
    threads send one at a time, and decoding has better to do than to wait for it."""

    def __init__(self, pb_utils: Any, instance: str) -> None:
        """instance: of a model there may be several, each with its own gauges. Triton without metrics is fine."""
        self._pb_utils, self._instance = pb_utils, instance
        self._families: dict[Figure, Any] = {}
        self._metrics: dict[tuple[Figure, tuple[object, ...]], Any] = {}
        self._gauges: dict[Figure, float] = {}
        self._told: queue.SimpleQueue[tuple[Figure, float, tuple[object, ...]] | None] = queue.SimpleQueue()
        try:
            for figure in (*COUNTED, *GAUGES):
                self._families[figure] = self._family(figure)
        except pb_utils.TritonModelException:  # the server was started without them
            self._families = {}
        self._thread = threading.Thread(target=self._run, name="pass-figures", daemon=True)
        self._thread.start()

    def record(self, figure: Figure, value: float, *labels: object) -> None:
        if self._families:
            self._told.put((figure, value, labels))

    def look(self, session: Session, model: str) -> None:
        """Tell what has changed of the gauges."""
        for figure, value in now(session).items():
            if self._gauges.get(figure) != value:
                self._gauges[figure] = value
                self.record(figure, value, model)

    def close(self) -> None:
        """Tell what is left, and end."""
        self._told.put(None)
        self._thread.join()

    def _run(self) -> None:
        troubles = Troubles()
        while (told := self._told.get()) is not None:
            with troubles.told():  # one figure is lost, rather than this thread
                self._tell(*told)

    def _tell(self, figure: Figure, value: float, labels: tuple[object, ...]) -> None:
        metric = self._metric(figure, labels)
        if figure.kind == "counter":
            metric.increment(value)
        elif figure.kind == "gauge":
            metric.set(value)
        else:
            metric.observe(value)

    def _family(self, figure: Figure) -> Any:
        kinds = self._pb_utils.MetricFamily
        kind = {"counter": kinds.COUNTER, "gauge": kinds.GAUGE, "histogram": kinds.HISTOGRAM}[figure.kind]
        return kinds(name=figure.name, description=figure.told, kind=kind)

    def _metric(self, figure: Figure, values: tuple[object, ...]) -> Any:
        if (figure, values) not in self._metrics:
            names = ("model_name", *figure.labels)
            labels = dict(zip(names, map(str, values), strict=True)) | {"instance": self._instance}
            more = {"buckets": list(figure.buckets)} if figure.buckets else {}
            self._metrics[figure, values] = self._families[figure].Metric(labels=labels, **more)
        return self._metrics[figure, values]
