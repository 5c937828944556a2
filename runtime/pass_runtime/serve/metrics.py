"""Figures for Prometheus, by vLLM's names where it has them. A registry of its own for every app."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pass_runtime.generation import Generation
from pass_runtime.session import Session

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
REASONS = {"stop": "stop", "length": "length", "error": "error"}
"""Of requests that ended by themselves; others were aborted."""


@dataclass
class Timing:
    """`time.perf_counter` of one sequence: when its request came, its first tokens, its last ones."""

    arrived: float
    first: float | None = None
    last: float = field(default=0.0)


class Metrics:
    """Counts as requests go; what is the case right now is asked of the session when somebody looks."""

    def __init__(self, session: Session, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.registry.register(_Now(session, model))
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that have ended.")
        self._written = self._counter("vllm:generation_tokens", "Tokens written.")
        self._success = self._counter("vllm:request_success", "Sequences that have ended.", "finished_reason")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first tokens.", LONG)
        self._between = self._histogram("vllm:inter_token_latency_seconds", "A pass by its tokens.", SHORT)
        self._each = self._histogram("vllm:request_time_per_output_token_seconds", "Mean of a sequence.", SHORT)
        self._end_to_end = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", LONG)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Reading the prompt.", LONG)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "From the first pass to the end.", LONG)
        self._prompt_sizes = self._histogram("vllm:request_prompt_tokens", "Prompt tokens.", TOKENS)
        self._written_sizes = self._histogram("vllm:request_generation_tokens", "Tokens written.", TOKENS)
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Passes that had drafts to check.")
        self._drafted = self._counter("vllm:spec_decode_num_draft_tokens", "Drafts checked.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.")
        self._accepted_at = self._counter("vllm:spec_decode_num_accepted_tokens_per_pos", "By position.", "position")
        self._passes = self._counter("pass:passes", "Passes, one for every sequence that was in it.")
        self.responses = self._counter("pass:http_responses", "Responses by path and status.", "path", "status")

    def wrote(self, tokens: int, timing: Timing) -> None:
        """A pass has reached a request with so many tokens."""
        if not tokens:
            return
        now = time.perf_counter()
        self._written.labels(self._model).inc(tokens)
        if timing.first is None:
            timing.first = now
            self._first.labels(self._model).observe(now - timing.arrived)
        else:
            for _ in range(tokens):
                self._between.labels(self._model).observe((now - timing.last) / tokens)
        timing.last = now

    def ended(self, generation: Generation, timing: Timing) -> None:
        """A sequence is done, or nobody wants it any more."""
        now, stats, model = time.perf_counter(), generation.stats, self._model
        self._success.labels(model, REASONS.get(str(generation.finish_reason), "abort")).inc()
        self._prompt.labels(model).inc(stats.prompt_tokens)
        self._end_to_end.labels(model).observe(now - timing.arrived)
        self._prompt_sizes.labels(model).observe(stats.prompt_tokens)
        self._written_sizes.labels(model).observe(stats.generated_tokens)
        if timing.first is not None:
            self._prefill.labels(model).observe(stats.prefill_seconds)
            self._decode.labels(model).observe(stats.decode_seconds)
            if stats.generated_tokens > 1:
                self._each.labels(model).observe((timing.last - timing.first) / (stats.generated_tokens - 1))
        self._drafts.labels(model).inc(stats.steps)
        self._drafted.labels(model).inc(stats.drafted)
        self._accepted.labels(model).inc(stats.accepted)
        for position, share in enumerate(stats.acceptance_per_position):
            self._accepted_at.labels(model, position).inc(round(share * stats.steps))
        self._passes.labels(model).inc(stats.passes)

    def text(self) -> bytes:
        """What /metrics says."""
        return generate_latest(self.registry)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(name, told, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, told, ("model_name",), buckets=buckets, registry=self.registry)


class _Now(Collector):
    """Gauges, read from the session."""

    def __init__(self, session: Session, model: str) -> None:
        self._session, self._model = session, model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        usage = self._session.usage()
        values = {
            "vllm:num_requests_running": ("Sequences in slots.", usage.running),
            "vllm:num_requests_waiting": ("Sequences that wait for a slot.", usage.waiting),
            "vllm:kv_cache_usage_perc": ("Share of the largest KV cache that is in use, 0 to 1.", usage.cache_share),
            "pass:slots": ("Sequences that can be decoded at a time.", usage.slots),
        }
        for name, (told, value) in values.items():
            gauge = GaugeMetricFamily(name, told, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
