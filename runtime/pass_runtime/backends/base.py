"""What an engine must do for the decoding loop. The base class checks, a subclass computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.noise import noise_offsets
from pass_runtime.bundle.plan import MAX_LOOKAHEAD, MODES, Plan, make_cycle, verify_plan
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError


@dataclass(frozen=True)
class Capabilities:
    """How engines differ, as data.

    capacities: KV capacities S in rising order; a sequence starts in the smallest that fits and grows.
    prefill_widths: chunk widths Q in falling order, ending in 1.
    least_width: narrower windows are padded to it.
    lookahead: the only number of drafts that plans may have, with full groups; None allows any plan.
    """

    device: str
    vocab_size: int
    capacities: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    lookahead: int | None = None
    least_width: int = 1

    @property
    def max_capacity(self) -> int:
        return self.capacities[-1]

    def allows(self, plans: Sequence[Plan]) -> bool:
        """Whether there are engines for all of `plans`."""
        if self.lookahead is None:
            return True
        return set(plans) <= {plan for mode in MODES for plan in make_cycle(mode, self.lookahead).plans}

    def verify_plan(self, drafts: int) -> Plan:
        """The plan that verifies `drafts` drafts; it may have room for more."""
        return verify_plan(drafts if self.lookahead is None else self.lookahead)

    @property
    def positions(self) -> int:
        """N, the positions a tail may want noise for."""
        return listed_positions(self.max_capacity)


def listed_positions(capacity: int) -> int:
    """N for a cache of `capacity` columns: a window's last row predicts one past it, and a fused tail looks as far as a
    full group would."""
    return capacity + 1 + MAX_LOOKAHEAD


class Backend(ABC):
    """One sequence on one device: its KV cache, its window, and the two kinds of graphs."""

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.capacity = 0
        self.cached: list[int] = []
        """The tokens whose K/V are in the cache."""
        self.root = 0
        """The newest token, not yet in the cache."""
        self.owner: object = None
        """Whoever began the current request: a later request takes the cache away from an earlier one."""

    @property
    def length(self) -> int:
        """Valid KV entries, which is also the position of the root."""
        return len(self.cached)

    def begin(self, owner: object, params: SamplingParams, *, keep: int = 0) -> None:
        """Start a request, keeping the first `keep` entries of the cache."""
        if keep > self.length:
            raise ValueError(f"cannot keep {keep} of {self.length} cached entries")
        self.owner = owner
        del self.cached[keep:]
        self._begin(params)

    def _noise_offsets(self, seed: int, stream: str) -> npt.NDArray[np.int64]:
        """[N,2] for the positions 0..N-1."""
        return noise_offsets(seed, np.arange(self.capabilities.positions, dtype=np.int64), stream)

    def fits(self, width: int) -> bool:
        """Whether a window of `width` rows fits behind the committed entries, after growing if need be."""
        return self.length + max(width, self.capabilities.least_width) <= self.capabilities.max_capacity

    def reserve(self, width: int) -> None:
        """Make room for a window of `width` rows, growing to the next capacity if need be."""
        needed = self.length + max(width, self.capabilities.least_width)
        if needed > self.capabilities.max_capacity:
            raise PassError(f"{needed} tokens do not fit the KV capacity of {self.capabilities.max_capacity}")
        if needed > self.capacity:
            self.capacity = next(size for size in self.capabilities.capacities if size >= needed)
            self._grow(self.capacity)

    def prefill(self, tokens: Sequence[int], width: int) -> None:
        """Write the K/V of `tokens` in a window of `width` rows; rows beyond the tokens are padding."""
        if not 0 < len(tokens) <= width:
            raise ValueError(f"{len(tokens)} tokens in a window of {width}")
        self.reserve(width)
        self._prefill(tokens, width)
        self.cached += tokens

    def enter(self, plan: Plan, drafts: Sequence[int] = ()) -> None:
        """Lay out the window of `plan` at the root. A draft row without a draft gets id V, which no sample equals."""
        if len(drafts) > plan.drafts:
            raise ValueError(f"{plan.name} has no room for {len(drafts)} drafts")
        vocab = self.capabilities.vocab_size
        absent = [vocab] * (plan.drafts - len(drafts))
        ids = np.concatenate([[self.root, *drafts, *absent], plan.lookahead_ids(vocab)]).astype(np.int64)
        self._enter(ids, plan)

    def step(self, plan: Plan) -> list[int]:
        """Run trunk and tail once; returns the tokens emitted. The next plan's window is in place afterwards."""
        self.reserve(plan.width)
        emitted = self._step(plan)
        self.cached += [self.root, *emitted[:-1]]
        self.root = emitted[-1]
        return emitted

    def time(self, plan: Plan) -> tuple[float, float]:
        """Seconds of trunk and tail in one pass over `plan` that leaves no trace."""
        self.reserve(plan.width)
        self.enter(plan)
        return self._time(plan)

    def close(self) -> None:  # noqa: B027 (most engines have nothing to do)
        """Give back what the device holds; harmless when repeated."""

    @abstractmethod
    def _begin(self, params: SamplingParams) -> None:
        """Take the request's sampling parameters."""

    @abstractmethod
    def _grow(self, capacity: int) -> None:
        """Move the first `self.length` entries of the cache into buffers of `capacity`."""

    @abstractmethod
    def _prefill(self, tokens: Sequence[int], width: int) -> None:
        """Run the trunk over a causal window of `tokens`, padded to `width`."""

    @abstractmethod
    def _enter(self, ids: npt.NDArray[np.int64], plan: Plan) -> None:
        """Write the window `ids` [Q] of `plan`, and the length."""

    @abstractmethod
    def _step(self, plan: Plan) -> list[int]:
        """Run trunk and tail of `plan` on the window in place; returns the emitted tokens."""

    @abstractmethod
    def _time(self, plan: Plan) -> tuple[float, float]:
        """`_step`, timed: seconds of trunk and tail."""

    @abstractmethod
    def logits(self, plan: Plan) -> npt.NDArray[np.float32]:
        """[Q,V] logits of the last pass over `plan`, on the host. For checks, not for the loop."""
