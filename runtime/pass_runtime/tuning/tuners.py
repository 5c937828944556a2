"""The tuners of a session: one for each sampler, as the tails differ by sampler."""

from __future__ import annotations

from collections.abc import Callable

from pass_runtime.backends.base import Capabilities, PassKind
from pass_runtime.bundle.manifest import LookaheadInfo, Manifest
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.tuning.pass_times import PassTimes, measure, probe_plans, shape_of
from pass_runtime.tuning.tuner import PlanTuner

IdlePass = Callable[[PassKind], tuple[float, float]]
"""Seconds of trunk and tail in a pass that changes no sequence (`pass_runtime.decode.runner.Runner.idle_pass`)."""

UNSTATED = 0.6
"""The conditional acceptance of sampled drafts, as a share of that of greedy ones, where a bundle states only those."""


def stated_acceptance(lookahead: LookaheadInfo, sampler: Sampler) -> tuple[float, ...]:
    """[L] cumulative acceptance that the bundle states for this sampler; derived from the greedy one where it states
    none for sampling."""
    greedy, sampled = lookahead.acceptance_per_position, lookahead.acceptance_per_position_sampled
    if sampler == "greedy" or sampled:
        return greedy if sampler == "greedy" else sampled
    return tuple(share * UNSTATED**i for i, share in enumerate(greedy, 1))


class Tuners:
    """Makes a tuner when the first request with its sampler comes. The very first one times passes of all widths, and
    so does the first batch of each size. Later samplers time only the passes that show how their tails differ.

    Which passes are timed depends on the bundle, the engine and the capacity alone, not on the room that running
    sequences leave in the KV cache: with too little room, timing is put off.
    """

    def __init__(
        self, manifest: Manifest, capabilities: Capabilities, idle_pass: IdlePass, room: Callable[[], int]
    ) -> None:
        """room: returns the tokens of KV capacity that a window may take now."""
        self._manifest, self._capabilities, self._idle_pass, self._room = manifest, capabilities, idle_pass, room
        self._plans = {batch: self._timed_plans(batch) for batch in (1, *capabilities.batch_sizes)}
        self._tuners: dict[Sampler, PlanTuner] = {}

    def known(self, sampler: Sampler, batch: int) -> bool:
        """Whether `get` has nothing left to time for these."""
        if sampler not in self._tuners:
            return False
        return batch == 1 or not self._plans[batch] or batch in self._tuners[sampler].by_batch

    def get(self, sampler: Sampler, batch: int = 1) -> PlanTuner | None:
        """The tuner for `sampler`, which knows the times of passes over `batch` slots.

        None where passes must be timed first, but their windows do not fit into the cache after the running sequences.
        Where they do not fit into the whole capacity, it is always None.
        """
        if not self.known(sampler, batch):
            widest = max((plan.width for plan in (*self._plans[1], *self._plans[batch])), default=0)
            if not self._plans[1] or self._capabilities.padded_width(widest) > self._room():
                return None
            if sampler not in self._tuners:
                stated, length = stated_acceptance(self._manifest.lookahead, sampler), self._manifest.lookahead.length
                self._tuners[sampler] = PlanTuner(self._times(sampler), length, stated, self._capabilities)
            if not self.known(sampler, batch):
                self._tuners[sampler].by_batch[batch] = self._times(sampler, batch)
        return self._tuners[sampler]

    def _times(self, sampler: Sampler, batch: int = 1) -> PassTimes:
        """Time passes; few of them where the times of this batch size are known for another sampler."""
        plans = self._plans[batch]
        like = next((tuner.by_batch[batch] for tuner in self._tuners.values() if batch in tuner.by_batch), None)
        if like is not None:
            most = max(plan.drafts for plan in plans if not plan.groups)
            plans = [plan for plan in plans if not plan.drafts or (plan.drafts == most and not plan.groups)]
        timed = measure(lambda plan: self._idle_pass(PassKind(plan, batch, sampler)), plans)
        return PassTimes({shape_of(plan, batch): seconds for plan, seconds in timed.items()}, like)

    def _timed_plans(self, batch: int) -> list[Plan]:
        """The plans to time over `batch` slots, the narrowest first. Their windows take at most half the capacity, so
        that there is room until a text is that long.

        Empty where only one width would be left, from which no other can be estimated: the batch then counts as one
        window with as many rows.
        """
        able, every = self._capabilities, probe_plans(self._manifest.lookahead.length, batch)
        plans = [p for p in every if able.allows([p]) and 2 * able.padded_width(p.width) <= able.max_capacity]
        return plans if len({plan.width for plan in plans}) > 1 else []
