"""The metrics of requests, by vLLM's names and definitions where it has them. A `MetricSink` keeps and shows them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pass_runtime import Generation, Piece, Session

SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
FINISHED_REASONS = {"stop": "stop", "length": "length", "error": "error"}
"""Values of `finished_reason` for sequences that ended by themselves; the others are "abort"."""


@dataclass(frozen=True, eq=False)
class Metric:
    """labels: besides `model_name`. buckets: a histogram's upper bounds."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, description: str, *labels: str) -> Metric:
    return Metric("counter", f"{name}_total", description, labels)


def _histogram(name: str, description: str, buckets: tuple[float, ...]) -> Metric:
    return Metric("histogram", name, description, buckets=buckets)


PROMPT = _counter("vllm:prompt_tokens", "Prompt tokens of requests that have ended.")
CACHE_QUERIES = _counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the KV cache.")
CACHE_HITS = _counter("vllm:prefix_cache_hits", "Prompt tokens that were in it.")
WRITTEN = _counter("vllm:generation_tokens", "Tokens written.")
SUCCESS = _counter("vllm:request_success", "Sequences that have ended.", "finished_reason")
FIRST = _histogram("vllm:time_to_first_token_seconds", "From arrival to the first tokens.", LONG_SECONDS)
BETWEEN = _histogram("vllm:inter_token_latency_seconds", "Between passes that wrote.", SHORT_SECONDS)
EACH = _histogram("vllm:request_time_per_output_token_seconds", "Mean of a sequence.", SHORT_SECONDS)
END_TO_END = _histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", LONG_SECONDS)
QUEUE = _histogram("vllm:request_queue_time_seconds", "Waiting for a slot.", LONG_SECONDS)
PREFILL = _histogram("vllm:request_prefill_time_seconds", "From a slot to the first tokens.", LONG_SECONDS)
DECODE = _histogram("vllm:request_decode_time_seconds", "From the first tokens to the last.", LONG_SECONDS)
INFERENCE = _histogram("vllm:request_inference_time_seconds", "From a slot to the last tokens.", LONG_SECONDS)
PROMPT_SIZES = _histogram("vllm:request_prompt_tokens", "Prompt tokens.", TOKEN_COUNTS)
WRITTEN_SIZES = _histogram("vllm:request_generation_tokens", "Tokens written.", TOKEN_COUNTS)
DRAFTS = _counter("vllm:spec_decode_num_drafts", "Passes that had drafts to check.")
DRAFTED = _counter("vllm:spec_decode_num_draft_tokens", "Drafts checked.")
ACCEPTED = _counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.")
ACCEPTED_AT = _counter("vllm:spec_decode_num_accepted_tokens_per_pos", "By position.", "position")
CONSTRAINED = _counter("pass:constrained_requests", "Requests whose texts must have a form, by its kind.", "form")
PASSES = _counter("pass:passes", "Passes, one for every sequence that was in it.")
RECORDED = (
    *(PROMPT, CACHE_QUERIES, CACHE_HITS, WRITTEN, SUCCESS, FIRST, BETWEEN, EACH, END_TO_END),
    *(QUEUE, PREFILL, DECODE, INFERENCE, PROMPT_SIZES, WRITTEN_SIZES),
    *(DRAFTS, DRAFTED, ACCEPTED, ACCEPTED_AT, CONSTRAINED, PASSES),
)

RUNNING = Metric("gauge", "vllm:num_requests_running", "Sequences in slots.")
WAITING = Metric("gauge", "vllm:num_requests_waiting", "Sequences that wait for a slot.")
KV_CACHE = Metric("gauge", "vllm:kv_cache_usage_perc", "Share of the largest KV cache that is in use, 0 to 1.")
SLOTS = Metric("gauge", "pass:slots", "Sequences that can be decoded at a time.")
UNCAPTURED = Metric("gauge", "pass:graphs_not_captured", "Graphs that a GPU runs without a CUDA graph, more slowly.")
GAUGES = (RUNNING, WAITING, KV_CACHE, SLOTS, UNCAPTURED)


def read_gauges(session: Session) -> dict[Metric, float]:
    """The present values of the gauges, which are not recorded but read from the session when they are shown."""
    usage = session.usage()
    return {
        RUNNING: usage.running,
        WAITING: usage.waiting,
        KV_CACHE: usage.cache_share,
        SLOTS: usage.slots,
        UNCAPTURED: usage.graphs_not_captured,
    }


class MetricSink(Protocol):
    """Keeps metrics and shows them, as Prometheus' client or Triton does."""

    def record(self, metric: Metric, value: float, *labels: object) -> None:
        """Add `value` to a counter, or observe it in a histogram. labels: the model's name, then the metric's own."""


@dataclass
class Timing:
    """`time.perf_counter` of one sequence: when its request came, its first tokens, its last ones."""

    arrived: float
    first: float | None = None
    last: float = field(default=0.0)


class RequestMetrics:
    """Records what requests do, while they are decoded and when they end."""

    def __init__(self, sink: MetricSink, model: str) -> None:
        self._sink, self._model = sink, model

    def record_begin(self, form: str | None) -> None:
        """A request has begun. form: the kind of constraint that its texts follow; None if they are free."""
        if form is not None:
            self._record(CONSTRAINED, 1, form)

    def record_piece(self, piece: Piece, timing: Timing) -> None:
        """A pass has written for a sequence. Times are those of the pass, not of the reader that got the piece."""
        if not piece.tokens:
            return
        self._record(WRITTEN, len(piece.tokens))
        if timing.first is None:
            timing.first = piece.written
            self._record(FIRST, piece.written - timing.arrived)
        else:
            self._record(BETWEEN, piece.written - timing.last)
        timing.last = piece.written

    def record_end(self, generation: Generation, timing: Timing) -> None:
        """A sequence has ended, or its request has."""
        stats = generation.stats
        self._record(SUCCESS, 1, FINISHED_REASONS.get(str(generation.finish_reason), "abort"))
        self._record(PROMPT, stats.prompt_tokens)
        self._record(CACHE_QUERIES, stats.prompt_tokens)
        self._record(CACHE_HITS, stats.cached_tokens)
        self._record(QUEUE, stats.queue_seconds)
        self._record(END_TO_END, time.perf_counter() - timing.arrived)
        self._record(PROMPT_SIZES, stats.prompt_tokens)
        self._record(WRITTEN_SIZES, stats.generated_tokens)
        self._record(WRITTEN, stats.generated_tokens - len(generation.tokens))  # those that its reader did not wait for
        if timing.first is not None:
            prefill = timing.first - generation.submitted - stats.queue_seconds
            decode = timing.last - timing.first
            self._record(PREFILL, prefill)
            self._record(DECODE, decode)
            self._record(INFERENCE, prefill + decode)
            if stats.generated_tokens > 1:
                self._record(EACH, decode / (stats.generated_tokens - 1))
        self._record(DRAFTS, stats.steps)
        self._record(DRAFTED, stats.drafted)
        self._record(ACCEPTED, stats.accepted)
        for position, share in enumerate(stats.acceptance_per_position):
            self._record(ACCEPTED_AT, round(share * stats.steps), position)
        self._record(PASSES, stats.passes)

    def _record(self, metric: Metric, value: float, *labels: object) -> None:
        self._sink.record(metric, value, self._model, *labels)
