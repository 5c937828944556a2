"""How engines differ, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import MAX_LOOKAHEAD, MODES, Plan, make_cycle, verify_plan
from pass_runtime.errors import PassError

DEFAULT_BATCH = 8
"""The number of slots where neither the user nor the engines set one."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do.

    capacities: the KV capacities S in tokens that the cache may have, in rising order.
    prefill_widths: the widths Q of prompt chunks in falling order, ending in 1.
    batch_sizes: how many slots a pass may run over, in rising order; the last is the number of slots.
    least_width: narrower windows are padded to this many rows.
    listed: N, the number of positions whose noise the tails' inputs list; 0 is as many as the largest capacity needs.
    lookahead: the only number of drafts that plans may have, with full groups; None allows any plan.
    """

    device: str
    vocab_size: int
    capacities: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (1,)
    lookahead: int | None = None
    least_width: int = 1
    listed: int = 0

    @property
    def slots(self) -> int:
        return self.batch_sizes[-1]

    @property
    def max_capacity(self) -> int:
        return self.capacities[-1]

    @property
    def positions(self) -> int:
        """N, the number of positions that the tails' noise inputs list."""
        return self.listed or listed_positions(self.max_capacity)

    def batch_size(self, slots: int) -> int:
        """The smallest batch that covers the first `slots` slots."""
        return next(size for size in self.batch_sizes if size >= slots)

    def capacity(self, tokens: int) -> int:
        """The smallest KV capacity of at least `tokens`. ValueError where there is none: the StopIteration of a bare
        `next` would silently end a caller's generator."""
        if tokens > self.max_capacity:
            raise ValueError(f"{tokens} tokens do not fit a KV capacity of {self.max_capacity}")
        return next(size for size in self.capacities if size >= tokens)

    def padded_width(self, width: int) -> int:
        """The rows that a window of `width` rows has in memory, each of which writes one cache entry."""
        return max(width, self.least_width)

    def allows(self, plans: Sequence[Plan]) -> bool:
        """Whether there are engines for all of `plans`."""
        if self.lookahead is None:
            return True
        return set(plans) <= {plan for mode in MODES for plan in make_cycle(mode, self.lookahead).plans}

    def verify_plan(self, drafts: int) -> Plan:
        """The plan that verifies `drafts` drafts, which may have more draft rows than that."""
        return verify_plan(drafts if self.lookahead is None else self.lookahead)


def listed_positions(capacity: int) -> int:
    """N for a KV capacity in tokens. The last row of a window predicts the position after it, and a fused tail reads
    the noise as far as a full look-ahead group would reach."""
    return capacity + 1 + MAX_LOOKAHEAD


def batch_sizes(maximum: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to and including `maximum`."""
    sizes, size = [], 1
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)


def check_onnx_runtime(bundle: Path, manifest: Manifest) -> None:
    """PassError where ONNX Runtime cannot run the bundle on any machine."""
    if manifest.model.dtype == "bfloat16":
        raise PassError(
            f"bf16 bundles run on TensorRT engines: run pass-export build {bundle} --engine tensorrt; "
            "for ONNX Runtime export with --dtype fp16 or fp32"
        )
