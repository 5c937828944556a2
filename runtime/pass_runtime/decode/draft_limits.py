"""When nothing drafts, whatever plans requests name: many sequences at a time, or drafts that are seldom accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pass_runtime.decode.sequence import SequenceState
from pass_runtime.tuning.estimates import ConditionalAcceptance


def _unknown() -> ConditionalAcceptance:
    """What is assumed before any draft was verified: that drafts are accepted, so that they are tried."""
    return ConditionalAcceptance([1.0])


@dataclass
class DraftLimits:
    """concurrency: with more sequences than that decoding, none has drafts; None is without limit. acceptance: the
    least mean, over the sequences that decode, of the rate at which a pass's first draft is accepted; 0 is no limit.

    A sequence's rate is a running average that starts from that of all sequences. While nothing drafts for its sake,
    that one rises slowly, and sequences that come later try again.
    """

    concurrency: int | None = None
    acceptance: float = 0.0
    _all: ConditionalAcceptance = field(default_factory=_unknown)

    def allow(self, sequences: Sequence[SequenceState]) -> bool:
        """Whether the next pass over these sequences may have drafts."""
        if self.concurrency is not None and len(sequences) > self.concurrency:
            return False
        if self.acceptance <= 0.0:
            return True
        return sum(self._own(sequence).rates[0] for sequence in sequences) >= self.acceptance * len(sequences)

    def record(self, sequence: SequenceState, accepted: int) -> None:
        """Note that a pass verified drafts of `sequence`, and accepted the first `accepted` of them."""
        if self.acceptance > 0.0:
            for rate in (self._own(sequence), self._all):
                rate.record(1, min(accepted, 1))

    def forget(self) -> None:
        """Note a pass that was allowed no drafts."""
        self._all.forget()

    def _own(self, sequence: SequenceState) -> ConditionalAcceptance:
        if sequence.first_drafts is None:
            sequence.first_drafts = ConditionalAcceptance(self._all.rates)
        return sequence.first_drafts
