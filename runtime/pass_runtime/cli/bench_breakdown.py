"""pass-run bench --breakdown: where the time of a pass goes, and the speed that follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from pass_runtime.backends.base import PassKind
from pass_runtime.bundle.plan import ar_plan
from pass_runtime.measuring.turns import pass_seconds
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session


class Breakdown:
    """The passes of every plan are timed alone after each round, trunk and tail apart.

    `auto` and n-gram drafts choose their passes while they decode, so such plans have no breakdown.
    """

    def __init__(self, session: Session, plans: Mapping[str, tuple[GenerateOptions, int | None]]) -> None:
        """plans: options and sequences at a time (None: one by one) of each plan, by its name."""
        self._session = session
        self._plain = {name: self._ar_pass(*plan) for name, plan in plans.items()}
        self._kinds = {name: self._cycle(name, options) for name, (options, _) in plans.items()}
        self._seconds: dict[PassKind, list[tuple[float, float]]] = {
            kind: [] for kinds in (self._plain.values(), *self._kinds.values()) for kind in kinds
        }

    def _ar_pass(self, options: GenerateOptions, batch: int | None) -> PassKind:
        slots = self._session.backend.capabilities.batch_size(batch or 1)
        return PassKind(ar_plan(), slots, options.sampling.sampler)

    def _cycle(self, name: str, options: GenerateOptions) -> list[PassKind]:
        resolved = self._session.resolve(options)
        plans = () if resolved.cycle is None or resolved.ngram_drafts else resolved.cycle.plans
        return [replace(self._plain[name], plan=plan) for plan in plans]

    def time(self) -> None:
        """Time every kind of pass, with a KV cache as long as the texts made it."""
        for kind, seconds in self._seconds.items():
            seconds.append(self._session.call(lambda runner, kind=kind: pass_seconds(runner, kind)))  # type: ignore[misc]

    def of(self, name: str, tau: float) -> dict[str, float | None]:
        """Return milliseconds of trunk and tail, means over the plan's passes; tokens per second of a sequence if a
        pass took no longer than that; and the time of a pass relative to one of `ar`."""
        fields = "trunk_milliseconds", "tail_milliseconds", "predicted_tokens_per_second_each", "cost"
        if not (kinds := self._kinds[name]):
            return dict.fromkeys(fields)
        trunk, tail = (statistics.mean(self._median(kind)[part] for kind in kinds) for part in (0, 1))
        plain = sum(self._median(self._plain[name]))
        return dict(zip(fields, (1e3 * trunk, 1e3 * tail, tau / (trunk + tail), (trunk + tail) / plain), strict=True))

    def _median(self, kind: PassKind) -> tuple[float, float]:
        trunk, tail = (statistics.median(part) for part in zip(*self._seconds[kind], strict=True))
        return trunk, tail
