"""When nothing drafts, whatever plans requests name; the text stays what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from reciting import plans_run, reciting_session, right_unless, runner_of, words, wrong

from pass_runtime import GenerateOptions, load
from pass_runtime.decode.draft_limits import DraftLimits

LONG = GenerateOptions(400, plan="fused", lookahead=2, ignore_eos=True)


@pytest.mark.parametrize(("limit", "most_rows"), [(None, 5), (2, 5), (0, 1)])
def test_many_at_a_time_are_decoded_plainly(tiny_bundle: Path, limit: int | None, most_rows: int):
    """Above `speculative_max_concurrency` nothing drafts; below it plans are as they were, and the text always is."""
    options = GenerateOptions(24, plan="two-pass", lookahead=4, ignore_eos=True)
    with load(tiny_bundle, "cpu", threads=1, max_batch_size=4, speculative_max_concurrency=limit) as session:
        rows: list[tuple[int, int]] = []
        run = runner_of(session).run

        def noted(plan, drafts):
            rows.append((len(runner_of(session).decoding), plan.width))
            return run(plan, drafts)

        runner_of(session).run = noted
        alone = session.generate_ids([5, 6, 7], options).result().token_ids
        assert max(width for _, width in rows) == most_rows
        rows.clear()
        together = session._worker.call(lambda: [session.generate_ids([5, 6, 7], options) for _ in range(4)])
        assert all(stream.result().token_ids == alone for stream in together)
        most = 4 if limit is None else limit
        assert all(width == 1 or count <= most for count, width in rows)


@pytest.mark.parametrize(
    ("wrong_of_100", "threshold", "drafts_at_the_end"),
    [(100, 0.0, True), (100, 0.3, False), (50, 0.2, True), (50, 0.8, False), (10, 0.6, True)],
)
def test_drafts_that_are_seldom_accepted_are_given_up(
    tiny_bundle: Path, wrong_of_100: int, threshold: float, drafts_at_the_end: bool
):
    """Drafts are wrong at so many places of 100, here and there. The text is the model's, and the plan is used for as
    long as its drafts are accepted often enough."""
    drafter = right_unless(lambda position: position * 7919 % 100 < wrong_of_100)
    limits = DraftLimits(acceptance=threshold)
    with reciting_session(tiny_bundle, words, drafter, draft_limits=limits, capacity=512) as session:
        plans = plans_run(session)
        found = session.generate_ids([5], LONG).result()
    assert list(found.token_ids) == [words(position) for position in range(1, 401)]
    assert ("fused" in plans[-1]) == drafts_at_the_end
    assert "fused" in plans[0]


def test_one_that_drafts_badly_does_not_stop_a_batch_that_drafts_well(tiny_bundle: Path):
    """The mean of the batch decides, and each sequence counts with its own rate."""
    limits = DraftLimits(acceptance=0.4)
    with reciting_session(tiny_bundle, words, words, draft_limits=limits, slots=2, capacity=1024) as session:
        scheduler = session._worker._scheduler
        record = limits.record
        limits.record = lambda sequence, accepted: record(sequence, accepted if sequence.request.lookahead == 2 else 0)
        plans = plans_run(session)
        badly = GenerateOptions(300, plan="fused:1,1", lookahead=1, ignore_eos=True)
        for stream in session._worker.call(lambda: [session.generate_ids([5], each) for each in (LONG, badly)]):
            stream.result()
        assert scheduler.idle and "ar" not in plans
        plans.clear()
        session.generate_ids([5], badly).result()
        assert plans[-1] == "ar"


def test_later_requests_try_drafts_again(tiny_bundle: Path):
    """After long enough without drafts: texts differ, and so may how well they can be drafted."""
    drafter = [wrong]
    limits = DraftLimits(acceptance=0.2)
    with reciting_session(
        tiny_bundle, words, lambda position: drafter[0](position), draft_limits=limits, capacity=512
    ) as session:
        plans = plans_run(session)
        session.generate_ids([5], LONG).result()
        assert plans[-1] == "ar"
        drafter[0] = words
        again = 0
        while plans[-1] == "ar" and again < 10:
            session.generate_ids([5], LONG).result()
            again += 1
        assert plans[-1] != "ar"
