"""The plan `auto`: chooses the fastest plan by measured pass times and acceptance."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.base import Batch, Capabilities, Drafts
from pass_runtime.bundle.manifest import LookaheadInfo
from pass_runtime.bundle.plan import Plan, fused_plan, make_plan
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.bundle.window import (
    MAX_LOOKAHEAD,
    Window,
    ar_window,
    draft_window,
    fused_window,
    verify_window,
)
from pass_runtime.errors import OfOneProcess

Floats = npt.NDArray[np.float64]


AVERAGED_PASSES = 200.0
PRIOR_PASSES, NGRAM_PRIOR_PASSES = 10.0, 1.0
DEFAULT_ACCEPTANCE = 0.1
"""If the bundle states none."""
NGRAM_PRIORS = ((0.3, 0.8), (0.55, 0.75), (0.7, 0.8), (0.83, 0.83), (0.9, 0.9), (0.98, 0.97))
"""By confidence, the initial rate of the first n-gram draft and of the others."""
GRAMMAR_PRIOR = 0.98
SAMPLED_ACCEPTANCE_RATIO = 0.6
"""Sampled over greedy acceptance, if a bundle states only the latter."""


class Acceptance:
    """How often draft i of a chain is accepted if all drafts before it are."""

    def __init__(self, prior: Sequence[float], weight: float = PRIOR_PASSES) -> None:
        """prior: initial rates, with the weight of `weight` passes."""
        self._prior = list(prior)
        self._hits = [rate * weight for rate in prior]
        self._trials = [weight] * len(prior)

    @property
    def rates(self) -> list[float]:
        return [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]

    @property
    def cumulative(self) -> Floats:
        """[L+1]: the probability that the first i drafts are all accepted."""
        product: Floats = np.cumprod(np.array([1.0, *self.rates]))
        return product

    @property
    def expected(self) -> list[float]:
        """[L+1]: tokens of a pass that verifies the first i drafts, the bonus token included."""
        return list(accumulate(accumulate(self.rates, mul, initial=1.0)))

    def record(self, drafted: int, accepted: int) -> None:
        drafted = min(drafted, len(self._prior))
        for i in range(min(accepted + 1, drafted)):
            self._hits[i] = (self._hits[i] + (i < accepted)) * (1 - 1 / AVERAGED_PASSES)
            self._trials[i] = (self._trials[i] + 1) * (1 - 1 / AVERAGED_PASSES)
        # One more draft would probably be accepted about as often.
        if 0 < drafted == accepted < len(self._prior):
            rate = self._hits[drafted - 1] / self._trials[drafted - 1]
            self._pull(drafted, rate, 1 / AVERAGED_PASSES)

    def forget(self) -> None:
        """Count a pass without such drafts, so that they are tried again some day."""
        for i, rate in enumerate(self._prior):
            self._pull(i, rate, 1 / (8 * AVERAGED_PASSES))

    def _pull(self, i: int, rate: float, share: float) -> None:
        self._hits[i] += (rate * self._trials[i] - self._hits[i]) * share


class Rates:
    """Acceptance in one text or in all; n-grams by confidence."""

    def __init__(self, begin: Rates | Sequence[float]) -> None:
        """begin: the rates of all texts, or look-ahead's prior."""
        self._all = begin if isinstance(begin, Rates) else None
        self.lookahead: Acceptance = Acceptance(
            begin.lookahead.rates if isinstance(begin, Rates) else begin
        )
        self.by_confidence: dict[int, Acceptance] = {}
        self.grammar: Acceptance | None = None

    def of(self, drafts: Drafts | None) -> Acceptance:
        if drafts is None:
            return self.lookahead
        if drafts.source == "grammar":
            self.grammar = self.grammar or self._begin(drafts, GRAMMAR_PRIOR, GRAMMAR_PRIOR)
            return self.grammar
        confidence = drafts.confidence
        if confidence not in self.by_confidence:
            self.by_confidence[confidence] = self._begin(drafts, *NGRAM_PRIORS[confidence])
        return self.by_confidence[confidence]

    def _begin(self, drafts: Drafts, first: float, others: float) -> Acceptance:
        if self._all is None:
            return Acceptance([first, *[others] * (MAX_LOOKAHEAD - 1)])
        return Acceptance(self._all.of(drafts).rates, NGRAM_PRIOR_PASSES)


class Verified(NamedTuple):
    """drafts: None for look-ahead drafts."""

    drafts: Drafts | None
    drafted: int
    accepted: int
    rates: Rates | None


def stated_acceptance(lookahead: LookaheadInfo, sampler: Sampler) -> tuple[float, ...]:
    greedy, sampled = lookahead.acceptance_per_position, lookahead.acceptance_per_position_sampled
    if sampler == "greedy":
        return greedy
    return sampled or tuple(p * SAMPLED_ACCEPTANCE_RATIO**i for i, p in enumerate(greedy, 1))


AGREEMENT_RATIO = 1.1
"""Two times agree if they differ by at most this factor."""
TIMED_RUNS, TIMED_WIDE_RUNS, WIDE_WINDOW_ROWS = 4, 2, 8
"""Wide windows take long and are seldom the fastest."""
MAX_TIMED_ROWS = 64
TILE_GROUPS = ((2, 2, 1), (3, 3, 3, 3))
SLOWNESS_PASSES, RATIO_PASSES = 4, 32
"""The spans of two moving averages."""
MAX_DEVIATION = 1.2
"""Pauses do not repeat: a pass counts as at most this many times slower or faster than expected."""
MIN_PASS_SECONDS = 1e-9
FAR_X = 1_000_000
"""Beyond any pass: lines are extended to here."""


class PassShape(NamedTuple):
    """Window rows, sampled rows (roots and drafts) and next drafts, of all slots."""

    rows: int
    sampled: int
    drafts: int


def shape_of(window: Window, batch: int = 1) -> PassShape:
    return PassShape(batch * window.width, batch * (1 + window.drafts), batch * window.next.drafts)


def _line(points: Mapping[int, float], *, flat: bool = False) -> Callable[[int], float]:
    """Return a non-decreasing piecewise linear function through `points` (x -> y)."""
    xs = sorted(points)
    ys = list(accumulate((points[x] for x in xs), max))
    slope = 0.0
    if len(xs) > 1 and not flat:
        slope = max((ys[-1] - ys[i]) / (xs[-1] - xs[i]) for i in (0, -2))
    xs, ys = [*xs, xs[-1] + FAR_X], [*ys, ys[-1] + FAR_X * slope]
    return lambda x: float(np.interp(x, xs, ys))


class PassTimes:
    """The seconds of a pass: an estimate, times its shape's ratio, times the slowness of all
    passes (a busy machine, a longer text). Ratios and slowness are learned.

    The estimate sums piecewise linear functions: trunk by rows, its extra time with look-ahead
    rows, tail by sampled rows, its extra time by drafts.
    """

    def __init__(
        self, timed: Mapping[PassShape, tuple[float, float]], other_sampler: PassTimes | None = None
    ) -> None:
        """timed: seconds of trunk and tail by shape. other_sampler: gives the trunk's functions."""
        plain = {shape: seconds for shape, seconds in timed.items() if not shape.drafts}
        drafting = {shape: seconds for shape, seconds in timed.items() if shape.drafts}
        self.slowness = 1.0
        self._ratios = dict[PassShape, float]()
        self._estimates = dict[PassShape, float]()
        self.pass_counts: dict[PassShape, int] = {}
        if other_sampler is None:
            self.timed_widths = sorted({shape.rows for shape in timed})
            trunks = {shape.rows: trunk for shape, (trunk, _) in plain.items()}
            adapter_seconds = {
                shape.rows: max(trunk - trunks[shape.rows], 0.0)
                for shape, (trunk, _) in drafting.items()
                if shape.rows in trunks
            }
            # extra seconds with look-ahead rows, by rows
            self._adapter = _line(adapter_seconds or {0: 0.0}, flat=True)
            without_adapter = {
                shape.rows: trunk - self._adapter(shape.rows)
                for shape, (trunk, _) in drafting.items()
            }
            trunks = {**without_adapter, **trunks}
            if len(trunks) < 2:
                # More rows must not look free.
                trunks[0] = sum(trunks.values()) / 2
            self._trunk = _line(trunks)
        else:
            self.timed_widths, self._trunk = other_sampler.timed_widths, other_sampler._trunk
            self._adapter, self._ratios = other_sampler._adapter, dict(other_sampler._ratios)
            self.slowness = sum(trunk for trunk, _ in timed.values()) / sum(
                map(self._trunk_seconds, timed)
            )
        # `seconds` multiplies by the slowness.
        self._tail = _line(
            {shape.sampled: tail / self.slowness for shape, (_, tail) in plain.items()}
        )
        draft_seconds = {
            shape.drafts: tail / self.slowness - self._tail(shape.sampled)
            for shape, (_, tail) in drafting.items()
        }
        self._drafts = _line({0: 0.0, **draft_seconds})

    def _trunk_seconds(self, shape: PassShape) -> float:
        return self._trunk(shape.rows) + (self._adapter(shape.rows) if shape.drafts else 0.0)

    def seconds(self, shape: PassShape) -> float:
        if shape not in self._estimates:
            tail = self._tail(shape.sampled) + self._drafts(shape.drafts)
            self._estimates[shape] = max(self._trunk_seconds(shape) + tail, MIN_PASS_SECONDS)
        return self._estimates[shape] * self._ratios.get(shape, 1.0) * self.slowness

    def record(self, shape: PassShape, seconds: float) -> None:
        relative = seconds / self.seconds(shape)
        excess = min(max(relative, 1 / MAX_DEVIATION), MAX_DEVIATION) - 1.0
        count = self.pass_counts[shape] = self.pass_counts.get(shape, 0) + 1
        ratio_change = 1.0 + excess / min(count + SLOWNESS_PASSES - 1, RATIO_PASSES)
        self._ratios[shape] = self._ratios.get(shape, 1.0) * ratio_change
        mean = ratio_change ** (1 / len(self._ratios))
        self._ratios = {each: ratio / mean for each, ratio in self._ratios.items()}
        # This shape's seconds change by 1 / SLOWNESS_PASSES of the excess.
        self.slowness *= (1.0 + excess / SLOWNESS_PASSES) / ratio_change * mean


def probe_windows(lookahead: int, batch: int = 1, verifying: Sequence[Window] = ()) -> list[Window]:
    """Return windows to time; times in between are nearly linear. verifying: of
    `Capabilities`."""
    lengths, tiles = [1, lookahead], [*TILE_GROUPS]
    if lookahead > 5:  # One window in the middle replaces the 8-row tile.
        lengths, tiles = [1, 4, lookahead], tiles[1:]
    fused = [fused_window([length] * (length + 1)) for length in range(1, lookahead + 1)]
    widest = [window for window in fused if window.width * batch <= MAX_TIMED_ROWS][-1:]
    tile_windows = [fused_window(groups) for groups in tiles if len(groups) <= lookahead + 1]
    drafts = map(draft_window, (1, lookahead))
    max_rows = max(MAX_TIMED_ROWS, batch)
    widest += [window for window in verifying if window.width * batch <= max_rows][-1:]
    windows = [ar_window(), *map(verify_window, lengths), *drafts, *tile_windows, *widest]
    return [window for window in dict.fromkeys(windows) if window.width * batch <= max_rows]


DRAFT_COUNTS = (1, 2, 3, 4, 6)
NUM_SQUARINGS = 9
"""2^9 windows are enough for the stationary distribution."""


@cache
def plans_up_to(drafts: int, capabilities: Capabilities | None = None) -> tuple[Plan, ...]:
    """Return plain decoding, then the plans of at most `drafts` drafts, with falling and full
    groups."""
    if capabilities is not None and capabilities.fixed_lookahead is not None:
        drafts = min(drafts, capabilities.fixed_lookahead)
    counts = sorted({count for count in (*DRAFT_COUNTS, drafts) if 0 < count <= drafts})
    group_sizes = [sizes for n in counts for sizes in ((*range(n, 0, -1), 1), (n,) * (n + 1))]
    group_sizes += [sizes for sizes in TILE_GROUPS if len(sizes) <= drafts + 1]
    plans = [make_plan("ar", 0), *(make_plan("two-pass", count) for count in counts)]
    plans += map(fused_plan, dict.fromkeys(group_sizes))
    return tuple(
        plan for plan in plans if capabilities is None or capabilities.allows(plan.windows)
    )


def expected_tokens(plan: Plan, cumulative: Floats) -> float:
    """Return the tokens that a pass writes in one sequence. cumulative: [L+1]."""
    window = plan.windows[0]
    if not window.is_fused:  # Two-pass verifies in every second pass.
        return 1.0 + float(cumulative[1 : plan.drafts + 1].sum()) / 2
    counts = np.arange(window.drafts + 1)
    # [g, a]: row a is accepted in a window with g drafts
    row_accepted = (counts <= counts[:, None]) * cumulative[: window.drafts + 1]
    # [g, a]: row a is accepted, and no draft that follows it
    row_is_last = row_accepted.copy()
    row_is_last[:, :-1] -= row_accepted[:, 1:]
    # [g, h]: h drafts follow g drafts
    followed_by = np.equal.outer(np.array(window.groups), counts).astype(float)
    transitions = np.maximum(row_is_last, 0.0) @ followed_by
    # Keep the number with probability 1/2: same stationary distribution, and powers converge even
    # if numbers alternate.
    transitions = (transitions + np.eye(len(transitions))) / 2
    for _ in range(NUM_SQUARINGS):
        transitions = transitions @ transitions
    return 1.0 + float(transitions[0] @ row_accepted[:, 1:].sum(1))


DECISION_INTERVAL_PASSES = 12
DECISION_TIME_SHARE = 0.005
SWITCH_MARGIN = 1.03
"""Leave a plan only for one that is so many times as fast."""
DRAFT_MARGIN = 1.06
"""Drafts take the host about 0.1 ms a pass more, and their gain depends on the text."""
IDLE_PASSES, PLAIN_IDLE_PASSES, TRIAL_PASSES = 2000, 128, 4
"""An idle plan runs for TRIAL_PASSES passes if it is expected to be as fast as the chosen one."""


@dataclass(frozen=True)
class Choice:
    """tokens: per pass and sequence. seconds: of a pass over the batch."""

    plan: Plan
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Tuner(OfOneProcess):
    """Learns pass times and acceptance for one sampler, and chooses plans."""

    def __init__(
        self,
        times: PassTimes,
        max_drafts: int,
        acceptance: Sequence[float],
        capabilities: Capabilities | None = None,
    ) -> None:
        """times: over one slot. max_drafts: L. acceptance: cumulative, by position; may be
        empty."""
        rates = [
            after / before if before else 0.0 for before, after in pairwise([1.0, *acceptance])
        ]
        self.times_by_batch = {1: times}
        self.max_drafts = max_drafts
        self._capabilities = capabilities
        self.rates = Rates([*rates, *[DEFAULT_ACCEPTANCE] * max_drafts][:max_drafts])
        [self.decided] = self.choices(0)
        # by drafts and batch: decision, choice on trial, last pass of the trial
        self._decisions: dict[tuple[int, int], tuple[Choice, Choice, int]] = {}
        # by window and batch
        self._last_run: dict[tuple[Window, int], int] = {}
        self._passes, self._passes_at_decision = 0, 0
        self._decoding_seconds, self._next_decision_seconds = 0.0, 0.0

    @property
    def _widest(self) -> int:
        return self.times_by_batch[1].timed_widths[-1]

    def times(self, batch: int = 1) -> PassTimes:
        return self.times_by_batch.get(batch, self.times_by_batch[1])

    def pass_seconds(self, window: Window, batch: int = 1) -> float:
        return self.times(batch).seconds(shape_of(window, batch))

    def observe(
        self, window: Window, batch: int, seconds: float, verified: Sequence[Verified] = ()
    ) -> None:
        self._passes += 1
        self._decoding_seconds += seconds
        self._last_run[window, batch] = self._passes
        self.times(batch).record(shape_of(window, batch), seconds)
        for drafts, drafted, accepted, rates in verified:
            for each in (rates, self.rates) if drafted else ():
                if each is not None:
                    each.of(drafts).record(drafted, accepted)
        if not window.groups and not any(each.drafted for each in verified):
            # After many plain passes, look-ahead rates are out of date.
            for each in (self.rates, *(each.rates for each in verified)):
                if each is not None:
                    each.lookahead.forget()

    def choices(
        self, drafts: int, batch: int = 1, cumulative: Floats | None = None
    ) -> list[Choice]:
        """Return plans of at most `drafts` drafts, the fastest first, none wider than the timed
        ones. cumulative: the batch's mean."""
        if cumulative is None:
            cumulative = self.rates.lookahead.cumulative
        choices = []
        for plan in plans_up_to(drafts, self._capabilities):
            if plan.windows[0].width <= self._widest:
                seconds = sum(self.pass_seconds(window, batch) for window in plan.windows)
                tokens = expected_tokens(plan, cumulative)
                choices.append(Choice(plan, tokens, seconds / len(plan.windows)))
        return sorted(choices, key=lambda choice: -choice.rate)

    def choose(self, drafts: int, batch: int, rates: Sequence[Rates | None] = ()) -> Choice:
        """rates: the texts'."""
        key, started = (drafts, batch), time.perf_counter()
        enough_passes = self._passes - self._passes_at_decision >= DECISION_INTERVAL_PASSES
        if key not in self._decisions or (
            enough_passes and self._decoding_seconds >= self._next_decision_seconds
        ):
            self.decide(drafts, batch, rates)
            self._passes_at_decision = self._passes
            # Decisions take no more than their share of the time.
            waiting_seconds = (time.perf_counter() - started) / DECISION_TIME_SHARE
            earliest = max(self._next_decision_seconds, self._decoding_seconds)
            self._next_decision_seconds = earliest + waiting_seconds
        self.decided, trial, trial_end = self._decisions[key]
        return trial if self._passes < trial_end else self.decided

    def decide(self, drafts: int, batch: int = 1, rates: Sequence[Rates | None] = ()) -> Choice:
        own = [each.lookahead.cumulative for each in rates if each is not None]
        choices = self.choices(drafts, batch, np.mean(own, axis=0) if own else None)
        best, plain = choices[0], next(c for c in choices if not c.plan.drafts)
        before, *_ = self._decisions.get((drafts, batch), (self.decided,))
        in_use = next((c for c in choices if c.plan == before.plan), plain)
        decided = best if best.rate >= SWITCH_MARGIN * in_use.rate else in_use
        if decided.rate < DRAFT_MARGIN * plain.rate:
            decided = plain
        trial = decided
        for choice in choices if self._passes else []:
            last_run = self._last_run.get((choice.plan.windows[0], batch), -IDLE_PASSES)
            promising = choice is plain or choice.rate >= decided.rate
            idle_passes = PLAIN_IDLE_PASSES if choice is plain else IDLE_PASSES
            if promising and self._passes - last_run >= idle_passes:
                trial = choice
                break
        # It counts even if a request names another plan: else it would be tried for ever.
        self._last_run[trial.plan.windows[0], batch] = self._passes
        self._decisions[drafts, batch] = decided, trial, self._passes + TRIAL_PASSES
        self.decided = decided
        return decided

    def prefers(
        self, drafts: Drafts, rates: Rates | None, rows: int, lookahead_drafts: int
    ) -> bool:
        """Whether `drafts`, in a window with `rows` draft rows, promise more than look-ahead
        drafts."""
        expected = (rates or self.rates).of(drafts).expected[min(rows, len(drafts.tokens))]
        return expected > self.rates.lookahead.expected[lookahead_drafts]

    def verifying(
        self,
        choice: Choice,
        batch: int,
        proposed: Sequence[tuple[Drafts | None, Rates | None]],
        next_of_plan: Window,
        windows: Sequence[Window],
    ) -> Window | None:
        """Return the window of `windows` that writes tokens faster than the chosen plan, or None.
        If it interrupts a fused plan with a copy that is not accepted whole, the next pass has no
        look-ahead drafts: what they would have brought is subtracted."""
        drafting = [
            (len(drafts.tokens), (own or self.rates).of(drafts).expected)
            for drafts, own in proposed
            if drafts is not None
        ]
        others = len(proposed) - len(drafting)
        lost_tokens = choice.tokens - 1 if next_of_plan.is_fused else 0.0

        def tokens_per_second(window: Window) -> float:
            tokens = others * (1 - lost_tokens)
            for length, expected in drafting:
                count = min(length, window.drafts)
                all_accepted = expected[count] - expected[count - 1]
                tokens += expected[count] - (1 - all_accepted) * lost_tokens
            return tokens / self.pass_seconds(window, batch)

        plan_rate = choice.rate * len(proposed)  # a choice's rate is for one sequence
        if next_of_plan.drafts:
            # Two-pass accepts drafts in every second pass.
            tokens = choice.tokens if next_of_plan.is_fused else 2 * choice.tokens - 1
            in_copies = (expected[min(n, next_of_plan.drafts)] for n, expected in drafting)
            tokens = others * tokens + sum(max(tokens, each) for each in in_copies)
            plan_rate = tokens / self.pass_seconds(next_of_plan, batch)
        fitting = [each for each in windows if each.width <= self._widest]
        best = max(fitting, key=tokens_per_second, default=None)
        is_better = best and tokens_per_second(best) >= SWITCH_MARGIN * plan_rate
        return best if is_better else None

    def forget_unverified(self, drafts: Drafts, rates: Rates | None) -> None:
        """Let the rates of drafts that the pass left out drift back, else they stay low for
        ever."""
        for each in (rates, self.rates):
            if each is not None:
                each.of(drafts).forget()


class Auto(OfOneProcess):
    """A session's tuners by sampler: each has tails of its own.

    The first sampler times passes of all widths by batch size; later ones time what differs.
    Timing waits for room in the KV cache: estimates must not depend on what else runs.
    """

    def __init__(self, lookahead: LookaheadInfo, capabilities: Capabilities) -> None:
        self._lookahead, self._capabilities = lookahead, capabilities
        sizes = (1, *capabilities.batch_sizes)
        self._windows = {size: self._windows_to_time(size) for size in sizes}
        self._timed: dict[tuple[Sampler, int], dict[Window, list[tuple[float, float]]]] = {}
        self._tuners: dict[Sampler, Tuner] = {}

    def _windows_to_time(self, size: int) -> list[Window]:
        can = self._capabilities
        windows = [
            window
            for window in probe_windows(self._lookahead.length, size, can.verifying)
            if can.padded_width(window.width) <= can.max_capacity // 2 and can.allows([window])
        ]
        return windows if len({window.width for window in windows}) > 1 else []

    def is_timed(self, sampler: Sampler, size: int) -> bool:
        tuner = self._tuners.get(sampler)
        return tuner is not None and (not self._windows[size] or size in tuner.times_by_batch)

    def tuner(self, sampler: Sampler, size: int = 1) -> Tuner | None:
        return self._tuners[sampler] if self.is_timed(sampler, size) else None

    def untimed(self, sampler: Sampler, size: int, room: int) -> list[Batch]:
        """Return the passes to time next, once each. room: free tokens in the KV cache; too few
        give none."""
        widest = max((w.width for w in (*self._windows[1], *self._windows[size])), default=0)
        if self.is_timed(sampler, size) or not self._windows[1]:
            return []
        if self._capabilities.padded_width(widest) > room:
            return []
        for each in (1, size):
            if sampler not in self._tuners or each not in self._tuners[sampler].times_by_batch:
                batches = [
                    Batch(window, each, sampler)
                    for window, seconds in self._seconds_of(sampler, each).items()
                    if _needs_run(window, seconds)
                ]
                if batches:
                    return batches
        return []

    def _seconds_of(self, sampler: Sampler, size: int) -> dict[Window, list[tuple[float, float]]]:
        if (sampler, size) not in self._timed:
            windows = self._windows[size]
            if self._other_times(size) is not None:
                # Time windows without draft rows, and the widest that only verifies.
                most = max(window.drafts for window in windows if not window.groups)
                windows = [
                    window
                    for window in windows
                    if not window.drafts or (window.drafts == most and not window.groups)
                ]
            self._timed[sampler, size] = {window: [] for window in windows}
        return self._timed[sampler, size]

    def _other_times(self, size: int) -> PassTimes | None:
        times = (tuner.times_by_batch.get(size) for tuner in self._tuners.values())
        return next((each for each in times if each is not None), None)

    def timed(self, batch: Batch, trunk: float, tail: float) -> None:
        seconds = self._seconds_of(batch.sampler, batch.size)
        seconds[batch.window].append((trunk, tail))
        if any(_needs_run(window, each) for window, each in seconds.items()):
            return
        shapes = {
            shape_of(window, batch.size): (min(t for t, _ in each), min(t for _, t in each))
            for window, each in seconds.items()
        }
        times = PassTimes(shapes, self._other_times(batch.size))
        if batch.sampler in self._tuners:
            self._tuners[batch.sampler].times_by_batch[batch.size] = times
        else:
            stated = stated_acceptance(self._lookahead, batch.sampler)
            length = self._lookahead.length
            self._tuners[batch.sampler] = Tuner(times, length, stated, self._capabilities)
        del self._timed[batch.sampler, batch.size]


def _needs_run(window: Window, seconds: Sequence[tuple[float, float]]) -> bool:
    if len(seconds) < TIMED_WIDE_RUNS:
        return True
    most = TIMED_RUNS if window.width <= WIDE_WINDOW_ROWS else TIMED_WIDE_RUNS
    shortest = sorted(map(sum, seconds))[:2]
    return len(seconds) < most and shortest[1] > AGREEMENT_RATIO * shortest[0]
