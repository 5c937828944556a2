"""Runs passes before requests need them, on engines that repeat a pass as a captured CUDA graph: running it for the
first time and capturing it take far longer than repeating it."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pass_runtime.backends.base import PassKind
from pass_runtime.bundle.plan import MODES, Plan, make_cycle
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.decode.runner import Runner
from pass_runtime.errors import PassError

log = logging.getLogger("pass_runtime.backends")

RUNS = 2
"""After so many an engine has captured a pass."""


def rehearse(runner: Runner, capacity: int, batch: int, samplers: Collection[Sampler]) -> None:
    """Run the passes of all modes over `batch` slots with a KV capacity of so many tokens, every slot masked, and the
    chunks of prompts of the slots that no smaller batch has. It does nothing while a sequence runs, and leaves out what
    has no room after the tokens that free slots keep."""
    limits, before = runner.backend.capabilities, runner.backend.capacity
    kept = max(slot.cached for slot in runner.slots)
    if runner.busy or kept >= capacity:
        return
    try:
        runner.resize(capacity)
        for plan in rehearsed_plans(runner):
            if kept + limits.padded_width(plan.width) <= capacity:
                for sampler in samplers:
                    runner.rehearse(PassKind(plan, batch, sampler), RUNS)
        first = max((size for size in limits.batch_sizes if size < batch), default=0)
        for slot in runner.slots[first:batch]:
            for width in limits.chunks(kept, capacity):
                if kept + limits.padded_width(width) <= capacity:
                    runner.rehearse_prefill(slot, width, RUNS)
    except PassError as error:  # A request that needs such a pass meets the same error, and tells it.
        log.warning("passes over %d slots were not all run before requests need them: %s", batch, error)
    finally:
        if before and runner.backend.failure is None:
            runner.resize(before)


def rehearsed_plans(runner: Runner) -> list[Plan]:
    """The plans of MODES that the engines know."""
    lookahead = runner.backend.manifest.lookahead.length
    plans = {plan.name: plan for mode in MODES for plan in make_cycle(mode, lookahead).plans}
    return [plan for plan in plans.values() if runner.backend.capabilities.allows([plan])]
