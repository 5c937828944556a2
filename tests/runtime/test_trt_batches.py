"""Several requests at a time on engines of a fake device: each writes what the CPU writes."""

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


def requests(plans: tuple[str, ...], count: int = 7, **options: object) -> list[PromptAndOptions]:
    """Prompts of other lengths, texts of other lengths, and every way to sample."""
    return [
        (
            [3 + 5 * i, *PROMPT[: 4 + 9 * (i % 4)]],
            GenerateOptions(
                6 + 5 * i, SAMPLINGS[i % 3], plan=plans[i % len(plans)], ignore_eos=True, **options
            ),
        )
        for i in range(count)
    ]


def record_batches(session: Session) -> set[int]:
    """A set that grows by the batch of every pass."""
    batches: set[int] = set()
    run = session.backend.run

    def recorded(kind: PassKind) -> list[list[int]]:
        batches.add(kind.batch)
        return run(kind)

    session.backend.run = recorded  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "plans",
    [("ar",), ("two-pass",), ("fused",), ("auto",), ("ar", "fused", "two-pass", "auto")],
    ids="-".join,
)
def test_requests_side_by_side(gpu: Gpu, slots: int, plans: tuple[str, ...]):
    asked = requests(plans)
    with gpu.open(max_batch_size=slots) as session:
        batches = record_batches(session)
        written = [stream.result().token_ids for stream in submit_together(session, asked)]
    assert max(batches) == slots
    for one, ids in zip(asked, written, strict=True):
        assert_cpu_writes(gpu.bundle, one, ids)
    gpu.assert_all_freed()


def test_drafts_from_the_text_and_logprobs_side_by_side(gpu: Gpu):
    asked = requests(("two-pass", "fused"), draft="both") + requests(("fused",), 3, logprobs=2)
    with gpu.open(max_batch_size=SLOTS) as session:
        streams = [stream.result() for stream in submit_together(session, asked)]
    for one, stream in zip(asked, streams, strict=True):
        assert_cpu_writes(gpu.bundle, one, stream.token_ids)
        asks = one[1].logprobs is not None
        assert all((token.logprobs is not None) == asks for token in stream.tokens)


def test_processors_of_some_in_a_batch(gpu: Gpu):
    """The captured pass has the graph of processors, also for requests that need none."""
    asked = requests(("two-pass", "fused"), 4)
    changes = [
        {"constraint": Constraint(regex="[a-z ]{4,60}"), "ignore_eos": False},
        {"sampling": SamplingParams(0.9, seed=3, frequency_penalty=0.8, repetition_penalty=1.2)},
        {},
        {"sampling": SamplingParams(logit_bias={5: 3.0, 9: -4.0}), "bad_words": ("the",)},
    ]
    asked = [
        (prompt, replace(options, **change))
        for (prompt, options), change in zip(asked, changes, strict=True)
    ]
    with gpu.open(max_batch_size=SLOTS) as session:
        streams = [stream.result() for stream in submit_together(session, asked)]
        captures = gpu.cuda.captures
        again = [stream.result() for stream in submit_together(session, asked)]
        assert not session.backend.uncaptured and captures
    for one, stream, second in zip(asked, streams, again, strict=True):
        assert_cpu_writes(gpu.bundle, one, stream.token_ids)
        assert second.token_ids == stream.token_ids


@pytest.mark.slow
def test_a_repeated_batch_allocates_and_captures_nothing(gpu: Gpu):
    with gpu.open(max_batch_size=SLOTS) as session:
        asked = requests(("two-pass", "fused", "ar"), 6)
        # After some rounds every request was in every slot that it may get.
        written = [
            [stream.result().token_ids for stream in submit_together(session, asked)]
            for _ in range(10)
        ]
        before = gpu.counts()
        written += [
            [stream.result().token_ids for stream in submit_together(session, asked)]
            for _ in range(10)
        ]
        assert gpu.counts() == before
    assert all(ids == written[0] for ids in written)
