"""The table of all metrics, with vLLM's names if it has them, and what records them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pass_runtime import Piece, Session

if TYPE_CHECKING:
    from pass_server.answers import Choice

SHORT_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
"""These three are upper bounds of histograms' buckets, in seconds and in tokens."""
FINISHED_REASONS = ("stop", "length", "error")
"""The values of `Generation.finish_reason` that metrics repeat; the others count as "abort"."""


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric. labels: the names of its labels besides `model_name`. buckets: a histogram's."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


RECORDED: list[Metric] = []
"""What `RequestMetrics` records."""


def _counter(name: str, description: str, *labels: str) -> Metric:
    RECORDED.append(Metric("counter", f"{name}_total", description, labels))
    return RECORDED[-1]


def _histogram(name: str, description: str, buckets: tuple[float, ...]) -> Metric:
    RECORDED.append(Metric("histogram", name, description, buckets=buckets))
    return RECORDED[-1]


PROMPT_TOKENS = _counter("vllm:prompt_tokens", "Prompt tokens of requests that have ended.")
CACHE_QUERIES = _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the KV cache.")
CACHE_HITS = _counter("vllm:prefix_cache_hits", "Prompt tokens found in the KV cache.")
GENERATION_TOKENS = _counter("vllm:generation_tokens", "Tokens generated.")
REQUEST_SUCCESS = _counter("vllm:request_success", "Sequences that have ended.", "finished_reason")
TIME_TO_FIRST_TOKEN = _histogram(
    "vllm:time_to_first_token_seconds", "From arrival to the first tokens.", LONG_SECONDS
)
INTER_TOKEN_LATENCY = _histogram(
    "vllm:inter_token_latency_seconds", "Between passes that wrote tokens.", SHORT_SECONDS
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "vllm:request_time_per_output_token_seconds", "Mean over a sequence.", SHORT_SECONDS
)
E2E_LATENCY = _histogram(
    "vllm:e2e_request_latency_seconds", "From arrival to the end.", LONG_SECONDS
)
QUEUE_TIME = _histogram("vllm:request_queue_time_seconds", "Waiting for a slot.", LONG_SECONDS)
PREFILL_TIME = _histogram(
    "vllm:request_prefill_time_seconds", "From a slot to the first tokens.", LONG_SECONDS
)
DECODE_TIME = _histogram(
    "vllm:request_decode_time_seconds", "From the first tokens to the last.", LONG_SECONDS
)
INFERENCE_TIME = _histogram(
    "vllm:request_inference_time_seconds", "From a slot to the last tokens.", LONG_SECONDS
)
REQUEST_PROMPT_TOKENS = _histogram(
    "vllm:request_prompt_tokens", "Prompt tokens of a sequence.", TOKEN_COUNTS
)
REQUEST_GENERATION_TOKENS = _histogram(
    "vllm:request_generation_tokens", "Tokens of a sequence.", TOKEN_COUNTS
)
DRAFTS = _counter("vllm:spec_decode_num_drafts", "Passes that had drafts to check.")
DRAFT_TOKENS = _counter("vllm:spec_decode_num_draft_tokens", "Drafts checked.")
ACCEPTED_TOKENS = _counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.")
ACCEPTED_PER_POSITION = _counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted, by position.", "position"
)
CONSTRAINED_REQUESTS = _counter(
    "pass:constrained_requests", "Requests with a constraint, by its form.", "form"
)
PASSES = _counter("pass:passes", "Passes, each counted once per sequence in it.")
HTTP_RESPONSES = Metric(
    "counter", "pass:http_responses_total", "Responses by path and status.", ("path", "status")
)


def _gauge(name: str, description: str, *labels: str) -> Metric:
    return Metric("gauge", name, description, labels)


GAUGES: Mapping[str, Metric] = {
    "running": _gauge("vllm:num_requests_running", "Sequences in slots."),
    "waiting": _gauge("vllm:num_requests_waiting", "Sequences that wait for a slot."),
    "cache_share": _gauge(
        "vllm:kv_cache_usage_perc", "Share of the slots' KV capacity that is in use, 0 to 1."
    ),
    "slots": _gauge("pass:slots", "The most sequences that can decode at a time."),
    "graphs_not_captured": _gauge(
        "pass:graphs_not_captured", "Model graphs not captured as CUDA graphs: slower."
    ),
    "kernels": _gauge(
        "pass:kernels_info",
        "1, with the name of the kernels that run the model: on a CPU ours, or onnxruntime.",
        "name",
    ),
}
"""By the field of `Session.usage` that is the value, or the label."""


def read_gauges(session: Session) -> Iterator[tuple[Metric, float, tuple[str, ...]]]:
    """Yield the gauges with their present values and the values of their labels."""
    usage = session.usage()
    for name, metric in GAUGES.items():
        value = getattr(usage, name)
        yield (metric, 1.0, (value,)) if metric.labels else (metric, value, ())


class MetricSink(Protocol):
    """Keeps what is recorded: `PrometheusSink`, or `TritonMetricSink`."""

    def record(self, metric: Metric, value: float, *labels: object) -> None:
        """Add `value` to a counter, or observe it in a histogram. labels: the values of
        `model_name` and of the metric's own labels."""


class RequestMetrics:
    """Records requests while they are decoded and when they end."""

    def __init__(self, sink: MetricSink, model: str) -> None:
        self._sink, self._model = sink, model

    def record_begin(self, constraint_kind: str | None) -> None:
        """Record that a request has begun. constraint_kind: `ParsedRequest.constraint_kind`."""
        if constraint_kind is not None:
            self._record(CONSTRAINED_REQUESTS, 1, constraint_kind)

    def record_piece(self, choice: Choice, piece: Piece) -> None:
        """Record that a pass has written tokens of a sequence."""
        if not piece.tokens:
            return
        self._record(GENERATION_TOKENS, len(piece.tokens))
        if choice.first_written is None:
            choice.first_written = piece.written
            self._record(TIME_TO_FIRST_TOKEN, piece.written - choice.arrived)
        else:
            self._record(INTER_TOKEN_LATENCY, piece.written - choice.last_written)
        choice.last_written = piece.written

    def record_end(self, choice: Choice) -> None:
        """Record that a sequence has ended, by itself or with its request."""
        generation, stats, record = choice.generation, choice.generation.stats, self._record
        reason = str(generation.finish_reason)
        if reason not in FINISHED_REASONS:
            reason = "abort"
        record(REQUEST_SUCCESS, 1, reason)
        record(PROMPT_TOKENS, stats.prompt_tokens)
        record(CACHE_QUERIES, stats.prompt_tokens)
        record(CACHE_HITS, stats.cached_tokens)
        record(QUEUE_TIME, stats.queue_seconds)
        record(E2E_LATENCY, time.perf_counter() - choice.arrived)
        record(REQUEST_PROMPT_TOKENS, stats.prompt_tokens)
        record(REQUEST_GENERATION_TOKENS, stats.generated_tokens)
        # `record_piece` counted the tokens of pieces that were yielded, which are in
        # `generation.tokens`; a cancelled sequence may have written more.
        record(GENERATION_TOKENS, stats.generated_tokens - len(generation.tokens))
        if choice.first_written is not None:
            prefill = choice.first_written - generation.submitted - stats.queue_seconds
            decode = choice.last_written - choice.first_written
            record(PREFILL_TIME, prefill)
            record(DECODE_TIME, decode)
            record(INFERENCE_TIME, prefill + decode)
            if stats.generated_tokens > 1:
                record(TIME_PER_OUTPUT_TOKEN, decode / (stats.generated_tokens - 1))
        record(DRAFTS, stats.steps)
        record(DRAFT_TOKENS, stats.drafted)
        record(ACCEPTED_TOKENS, stats.accepted)
        for position, share in enumerate(stats.acceptance_per_position):
            record(ACCEPTED_PER_POSITION, round(share * stats.steps), position)
        record(PASSES, stats.passes)

    def _record(self, metric: Metric, value: float, *labels: object) -> None:
        self._sink.record(metric, value, self._model, *labels)
