"""Batches on TensorRT engines of a fake device: each request gets the text that the CPU writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import engine_sessions
import pytest
from engine_sessions import (
    PROMPT,
    SAMPLINGS,
    Gpu,
    PromptAndOptions,
    assert_cpu_writes,
    submit_together,
    with_engines,
)

from pass_runtime import Constraint, GenerateOptions, SamplingParams, Session
from pass_runtime.backends.base import PassKind

gpu = engine_sessions.gpu

SLOTS = 4


@pytest.fixture(scope="module", params=[1, 2], ids=["one row", "two rows"])
def engine_bundle(request, adapter_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(adapter_bundle, tmp_path_factory.mktemp("batches"), request.param, SLOTS)


def make_requests(
    plans: tuple[str, ...], count: int = 7, **options: object
) -> list[PromptAndOptions]:
    """Return requests that differ in length of prompt and text, in sampling and in plan."""
    return [
        (
            [3 + 5 * i, *PROMPT[: 4 + 9 * (i % 4)]],
            GenerateOptions(
                6 + 5 * i, SAMPLINGS[i % 3], plan=plans[i % len(plans)], ignore_eos=True, **options
            ),
        )
        for i in range(count)
    ]


def record_batch_sizes(session: Session) -> set[int]:
    """Return a set to which every pass adds how many slots it has."""
    batch_sizes: set[int] = set()
    run = session.backend.run

    def recorded(kind: PassKind) -> list[list[int]]:
        batch_sizes.add(kind.batch)
        return run(kind)

    session.backend.run = recorded  # type: ignore[method-assign]
    return batch_sizes


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "plans",
    [("ar",), ("two-pass",), ("fused",), ("auto",), ("ar", "fused", "two-pass", "auto")],
    ids="-".join,
)
def test_requests_side_by_side(gpu: Gpu, slots: int, plans: tuple[str, ...]):
    batch = make_requests(plans)
    with gpu.open(max_batch_size=slots) as session:
        batch_sizes = record_batch_sizes(session)
        written = [stream.result().token_ids for stream in submit_together(session, batch)]
    assert max(batch_sizes) == slots
    for request, ids in zip(batch, written, strict=True):
        assert_cpu_writes(gpu.bundle, request, ids)
    gpu.assert_all_freed()


def test_requests_with_ngram_drafts_beside_requests_with_logprobs(gpu: Gpu):
    batch = make_requests(("two-pass", "fused"), draft="both")
    batch += make_requests(("fused",), 3, logprobs=2)
    with gpu.open(max_batch_size=SLOTS) as session:
        streams = [stream.result() for stream in submit_together(session, batch)]
    for request, stream in zip(batch, streams, strict=True):
        assert_cpu_writes(gpu.bundle, request, stream.token_ids)
        with_logprobs = request[1].logprobs is not None
        assert all((token.logprobs is not None) == with_logprobs for token in stream.tokens)


def test_requests_with_and_without_processors_in_a_batch(gpu: Gpu):
    """The captured pass has the graph of processors, also for requests that need none."""
    batch = make_requests(("two-pass", "fused"), 4)
    changes = [
        {"constraint": Constraint(regex="[a-z ]{4,60}"), "ignore_eos": False},
        {"sampling": SamplingParams(0.9, seed=3, frequency_penalty=0.8, repetition_penalty=1.2)},
        {},
        {"sampling": SamplingParams(logit_bias={5: 3.0, 9: -4.0}), "bad_words": ("the",)},
    ]
    batch = [
        (prompt, replace(options, **change))
        for (prompt, options), change in zip(batch, changes, strict=True)
    ]
    with gpu.open(max_batch_size=SLOTS) as session:
        streams, repeated = (
            [stream.result() for stream in submit_together(session, batch)] for _ in range(2)
        )
        assert not session.backend.uncaptured and gpu.cuda.captures
    for request, stream, again in zip(batch, streams, repeated, strict=True):
        assert_cpu_writes(gpu.bundle, request, stream.token_ids)
        assert again.token_ids == stream.token_ids


@pytest.mark.slow
def test_a_repeated_batch_allocates_and_captures_nothing(gpu: Gpu):
    batch = make_requests(("two-pass", "fused", "ar"), 6)
    texts, counts = [], []
    with gpu.open(max_batch_size=SLOTS) as session:
        for _ in range(20):
            streams = submit_together(session, batch)
            texts.append([stream.result().token_ids for stream in streams])
            counts.append(gpu.counts())
    # After ten rounds, every request was in every slot that it may get.
    assert counts[9] == counts[19]
    assert all(ids == texts[0] for ids in texts)
