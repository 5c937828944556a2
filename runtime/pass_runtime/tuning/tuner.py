"""--plan auto: the plan with the most expected tokens per second, from measured passes and observed acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pass_runtime.backends.base import Backend
from pass_runtime.bundle.plan import Cycle, Plan, fused_cycle, make_cycle
from pass_runtime.decode.draft_policy import Pass, Steering
from pass_runtime.tuning.group_sizes import best_shape, chain_of, full_shape, shapes, two_pass_tokens
from pass_runtime.tuning.pass_times import PassTimes

EVERY = 12
"""Passes between two decisions."""
ADVANTAGE = 1.10
"""A plan must promise this much more than plain decoding, and than the present plan, to be taken up: promises rest on
measured times and on acceptance elsewhere."""
KEEP = 1.03
"""A plan that promises less than this against plain decoding is given up for it."""
SAMPLED = 0.6
"""What is left of the stated greedy acceptance when tokens are sampled (0.52 and 0.67 in SmolLM2's model card)."""
MEMORY = 200.0
"""Steps that an acceptance rate is averaged over."""
PRIOR_WEIGHT = 10.0
UNKNOWN = 0.1
"""Acceptance rate of drafts that nobody has measured."""
TEXT_PRIOR = 0.6
"""Acceptance rate of drafts from the text, before any was tried."""


class Acceptance:
    """Running averages: the rate at which draft i is accepted once those before it were."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = list(prior)
        self._hits = [rate * PRIOR_WEIGHT for rate in prior]
        self._trials = [PRIOR_WEIGHT] * len(prior)

    @property
    def rates(self) -> list[float]:
        return [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]

    def record(self, drafted: int, accepted: int) -> None:
        """One step: `accepted` of `drafted` drafts. Old steps fade, towards nothing known."""
        for i in range(min(accepted + 1, drafted)):
            self._hits[i] = (self._hits[i] + (i < accepted)) * (1 - 1 / MEMORY)
            self._trials[i] = (self._trials[i] + 1) * (1 - 1 / MEMORY)
        if drafted == accepted < len(self._prior):  # drafts that all survive make one more worth a try
            self._lean(drafted, self.rates[drafted - 1], 1 / MEMORY)

    def forget(self) -> None:
        """A pass without these drafts: drift slowly back to the prior, so that they are tried again one day."""
        for i, rate in enumerate(self._prior):
            self._lean(i, rate, 1 / (8 * MEMORY))

    def _lean(self, i: int, rate: float, share: float) -> None:
        self._hits[i] += (rate * self._trials[i] - self._hits[i]) * share


@dataclass(frozen=True)
class Candidate:
    """A mode with what it is expected to do."""

    cycle: Cycle
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


class Chooser:
    """What one session knows: pass times, and how well drafts do. Requests share it."""

    def __init__(
        self,
        times: PassTimes,
        lookahead: int,
        acceptance: Sequence[float],
        discount: float = 1.0,
        *,
        exactly: int | None = None,
        follow: bool = False,
    ) -> None:
        """acceptance: by position, as the bundle states it (see `LookaheadInfo`); empty where nobody measured it.

        discount: the part of a stated rate to expect at first (SAMPLED where tokens are sampled).
        exactly: the only look-ahead that there are plans for, with full groups (see `Capabilities.lookahead`).
        follow: whether `times` change with what passes turn out to take.
        """
        rates = [after / before if before else 0.0 for before, after in pairwise([1.0, *acceptance])]
        prior = [*(rate * discount for rate in rates), *[UNKNOWN] * lookahead][:lookahead]
        self.times, self.lookahead, self._exactly = times, lookahead, exactly
        self.drafts = Acceptance(prior)
        self.texts: dict[int, Acceptance] = {}
        self.chosen = make_cycle("ar", 0)
        self._follow = follow
        self.slower: dict[int, float] = {}
        """By window width: how much longer passes take than `times` say, a running average."""

    def seconds(self, width: int, sampled_rows: int) -> float:
        """Of one pass: as measured, and corrected by the passes since."""
        return self._slower_at(width) * self.times.seconds(width, sampled_rows)

    def plan_seconds(self, plan: Plan) -> float:
        """Of one pass over `plan`."""
        return self.seconds(plan.width, plan.sampled_rows)

    def observe(self, plan: Plan, seconds: float) -> None:
        """A pass over `plan` took so long. Widths that are not in use drift along: whatever slows a machine, and a
        longer text, slows them all."""
        if not self._follow:
            return
        ratio = seconds / self.times.seconds(plan.width, plan.sampled_rows)
        self.slower.setdefault(plan.width, self._slower_at(plan.width))
        for width, slower in self.slower.items():
            share = 1 / 8 if width == plan.width else 1 / 64
            self.slower[width] += (min(ratio, 1.5 * slower) - slower) * share  # a pause says nothing about a pass

    def _slower_at(self, width: int) -> float:
        widths = sorted(self.slower)
        return float(np.interp(width, widths, [self.slower[w] for w in widths])) if widths else 1.0

    def text(self, matched: int) -> Acceptance:
        """The acceptance of text drafts behind a match of `matched` tokens."""
        return self.texts.setdefault(matched, Acceptance([TEXT_PRIOR] * self.lookahead))

    def candidates(self, lookahead: int) -> list[Candidate]:
        """The best of each mode with at most `lookahead` drafts, `ar` included; best first."""
        times, chain = self.times, chain_of(self.drafts.rates[:lookahead])
        found = [self._candidate(make_cycle("ar", 0), 1.0)]
        lengths = range(1, lookahead + 1) if self._exactly is None else [self._exactly] * (lookahead >= self._exactly)
        pairs = [make_cycle("two-pass", length) for length in lengths]
        two_pass = [self._candidate(pair, two_pass_tokens(pair.lookahead, chain)) for pair in pairs]
        found += [max(two_pass, key=lambda candidate: candidate.rate)] if two_pass else []
        shape = best_shape(
            chain,
            lambda width, drafts: self.seconds(width, 2 * drafts + 1),
            times.max_width,
            shapes if self._exactly is None else lambda drafts: full_shape(drafts)[: drafts == self._exactly],
        )
        if shape is not None:
            found.append(Candidate(fused_cycle(shape.groups), shape.tokens, shape.seconds))
        return sorted(found, key=lambda candidate: -candidate.rate)

    def _candidate(self, cycle: Cycle, tokens: float) -> Candidate:
        seconds = [self.plan_seconds(plan) for plan in cycle.plans]
        return Candidate(cycle, tokens, sum(seconds) / len(seconds))

    def decide(self, lookahead: int) -> Candidate:
        """The best candidate that is clearly better than plain decoding and than the present choice."""
        candidates = self.candidates(lookahead)
        best, plain = candidates[0], next(c for c in candidates if c.cycle.lookahead == 0)
        present = next((c for c in candidates if c.cycle == self.chosen), None)
        if present is None:  # a fused plan of another shape, or one of another request's look-ahead
            present = next((c for c in candidates if c.cycle.plans[0].is_fused == self.chosen.plans[0].is_fused), best)
        if present is plain or present.rate < KEEP * plain.rate:
            decided = best if best.rate >= ADVANTAGE * plain.rate else plain
        else:
            decided = best if best.rate >= ADVANTAGE * present.rate else present
        self.chosen = decided.cycle
        return decided


class AutoSteering(Steering):
    """Steering whose mode, and whose trust in text drafts, follow a Chooser."""

    def __init__(self, chooser: Chooser, lookahead: int, *, rows: bool = True, text: bool = True) -> None:
        """rows, text: which drafts may be used."""
        self._chooser, self._limit = chooser, lookahead if rows else 0
        self._decided = chooser.decide(self._limit)
        self._passes = 0
        self._from_index = 0  # tokens matched, where the pass under way has drafts from the text
        super().__init__(self._decided.cycle, lookahead if text else 0)

    @property
    def name(self) -> str:
        return "auto"

    @property
    def lookahead(self) -> int:
        return max(self._limit, self._text_drafts)

    def record(self, plan: Plan, tokens: Sequence[int], seconds: float) -> None:
        self._chooser.observe(plan, seconds)
        accepted, chooser = len(tokens) - 1, self._chooser
        if self._from_index:
            chooser.text(self._from_index).record(self.drafted, accepted)
        elif self.drafted:
            chooser.drafts.record(self.drafted, accepted)
        elif not plan.groups:
            chooser.drafts.forget()
        super().record(plan, tokens, seconds)
        self._passes += 1
        if self._passes % EVERY == 0:
            self._decided = chooser.decide(self._limit)
            self._cycle = self._decided.cycle

    def _from_text(self, backend: Backend) -> Pass | None:
        """Drafts from the text where they promise more tokens per second than the mode does without them."""
        self._from_index = 0
        drafts, matched = self._index.propose(self._text_drafts), self._index.matched
        if not drafts:
            return None
        chooser = self._chooser
        chain = chain_of(chooser.text(matched).rates)
        fused = self._cycle.plans[0]
        if fused.is_fused and backend.fits(fused.width):
            if chain[1 : fused.drafts + 1].sum() <= chain_of(chooser.drafts.rates)[1 : self._left + 1].sum():
                return None
            chosen = Pass(fused, drafts[: fused.drafts])
        else:
            plans = [backend.capabilities.verify_plan(count) for count in range(1, len(drafts) + 1)]
            plans = [plan for plan in plans if backend.fits(plan.width)]
            seconds = [chooser.plan_seconds(plan) for plan in plans]
            rates = [float(chain[: i + 2].sum()) / each for i, each in enumerate(seconds)]
            best = max(rates, default=0.0)
            if best < KEEP * self._decided.rate:
                chooser.text(matched).forget()
                return None
            count = rates.index(best) + 1
            chosen = Pass(plans[count - 1], drafts[:count])
        self._from_index = matched
        return chosen
