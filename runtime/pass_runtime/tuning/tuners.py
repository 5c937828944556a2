"""The tuners of a session: one for every kind of sampling, whose passes differ in their tails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pass_runtime.backends.base import PassKind
from pass_runtime.backends.capabilities import Capabilities
from pass_runtime.bundle.manifest import LookaheadInfo, Manifest
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.tuning.pass_times import PassTimes, measure, probe_plans
from pass_runtime.tuning.tuner import PlanTuner

IdlePass = Callable[[PassKind], tuple[float, float]]
"""Seconds of trunk and tail in a pass that leaves no trace (`pass_runtime.decode.runner.Runner.idle_pass`)."""

UNSTATED = 0.6
"""What is left of each rate of acceptance when tokens are sampled, where a bundle states the greedy ones alone."""


def stated_acceptance(lookahead: LookaheadInfo, sampler: Sampler) -> tuple[float, ...]:
    """By position, as the bundle states it for this kind of decoding; derived where it does not."""
    greedy, sampled = lookahead.acceptance_per_position, lookahead.acceptance_per_position_sampled
    if sampler == "greedy" or sampled:
        return greedy if sampler == "greedy" else sampled
    return tuple(share * UNSTATED**i for i, share in enumerate(greedy, 1))


class Tuners:
    """The first request times passes of all widths, and so does the first batch of a size. The first of another kind
    only times those that show its tail, since kinds differ in their tails."""

    def __init__(
        self, manifest: Manifest, capabilities: Capabilities, idle_pass: IdlePass, room: Callable[[], int]
    ) -> None:
        """room: rows that a window may have now."""
        self._manifest, self._capabilities, self._idle_pass, self._room = manifest, capabilities, idle_pass, room
        self._tuners: dict[Sampler, PlanTuner] = {}

    def known(self, sampler: Sampler, batch: int) -> bool:
        """Whether `get` has nothing to time."""
        return sampler in self._tuners and (batch == 1 or batch in self._tuners[sampler].times.batched)

    def get(self, sampler: Sampler, batch: int = 1) -> PlanTuner:
        """The tuner for `sampler`, which knows the times of passes over `batch` slots."""
        if sampler not in self._tuners:
            self._tuners[sampler] = self._new(sampler)
        tuner = self._tuners[sampler]
        if not self.known(sampler, batch):
            tuner.times.batched[batch] = self._measure(sampler, self._plans(batch), batch)
        return tuner

    def _new(self, sampler: Sampler) -> PlanTuner:
        lookahead = self._manifest.lookahead
        return PlanTuner(
            self._times(sampler),
            lookahead.length,
            stated_acceptance(lookahead, sampler),
            exactly=self._capabilities.lookahead,
            follow=True,
        )

    def _times(self, sampler: Sampler) -> PassTimes:
        known = next(iter(self._tuners.values())).times if self._tuners else None
        plans = self._plans()
        if known is None or not {plan.width for plan in plans} <= {*known.trunk, *known.lookahead}:
            return self._measure(sampler, plans)
        verifying = [plan for plan in plans if not plan.next.drafts]
        drafting = [plan for plan in plans if plan.next.drafts and not plan.is_fused]
        return known.with_tail(
            self._measure(sampler, list(dict.fromkeys([*verifying[:1], *verifying[-1:], *drafting])))
        )

    def _plans(self, batch: int = 1) -> list[Plan]:
        """What can be run now, the narrowest first."""
        plans = probe_plans(self._manifest.lookahead.length, batch)
        return [plan for plan in plans if self._capabilities.allows([plan]) and plan.width <= self._room()]

    def _measure(self, sampler: Sampler, plans: Sequence[Plan], batch: int = 1) -> PassTimes:
        return measure(lambda plan: self._time(plan, sampler, batch), plans)

    def _time(self, plan: Plan, sampler: Sampler, batch: int) -> tuple[float, float]:
        return self._idle_pass(PassKind(plan, batch, sampler))
