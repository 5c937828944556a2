"""A bundle's graphs over the slots of one device. The base class fills the buffers, a subclass runs the graphs.

A backend keeps no account of sequences: what is in a slot, and how far, `pass_runtime.decode.runner` knows. Everything
that a pass needs is either in the buffers (written here, or by the graphs of the pass before) or in the KV cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.buffers import Buffers
from pass_runtime.backends.capabilities import Capabilities
from pass_runtime.backends.kv_cache import KVCache
from pass_runtime.backends.memory import Memory
from pass_runtime.bundle.bindings import PREFILL, BundleBindings
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.noise import STREAMS, noise_offsets
from pass_runtime.bundle.plan import Plan, prefill_plan
from pass_runtime.bundle.sampling import MAX_LOGPROBS, Sampler, SamplingParams


@dataclass(frozen=True)
class PassKind:
    """What is run: a plan over the first `batch` slots, and which graphs follow the trunk."""

    plan: Plan
    batch: int
    sampler: Sampler
    logprobs: bool = False


@dataclass(frozen=True)
class Logprobs:
    """Of the emitted tokens: `chosen` [b,E]; the most likely ones `ids` [b,E,K] with their `values` [b,E,K]."""

    chosen: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class Backend(ABC):
    """Slots 0 .. capabilities.slots-1 of one bundle on one device."""

    def __init__(self, bundle: Path, manifest: Manifest, capabilities: Capabilities, memory: Memory) -> None:
        self.bundle, self.manifest, self.capabilities, self.memory = bundle, manifest, capabilities, memory
        self.buffers = Buffers(memory, capabilities.slots)
        self.bindings = BundleBindings(manifest, capabilities.positions, capabilities.least_width)
        self.cache = KVCache(memory, manifest, capabilities.slots)
        self._streams = STREAMS if manifest.rule == "rejection" else STREAMS[:1]

    @property
    def capacity(self) -> int:
        """Cache columns that a pass may use now."""
        return self.cache.capacity

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        """Make room for `capacity` columns, keeping the first `lengths[slot]` of every slot. All or nothing."""
        self.cache.resize(capacity, lengths)

    def set_sampling(self, slot: int, params: SamplingParams) -> None:
        """How the tokens of `slot` are drawn."""
        write = self.buffers.write_row
        if params.sampler != "greedy":
            positions = np.arange(self.capabilities.positions, dtype=np.int64)
            for stream in self._streams:
                write(stream, slot, noise_offsets(params.seed or 0, positions, stream), np.int64)
        write("temperature", slot, params.temperature, np.float32)
        write("top_k", slot, params.top_k, np.int64)
        write("top_p", slot, params.top_p, np.float32)
        write("min_p", slot, params.min_p, np.float32)

    def park(self, slot: int, length: int) -> None:
        """Leave `slot` out of the passes to come: they write behind `length` and change nothing else of it."""
        self._set_slot(slot, length, active=False)

    def enter(self, slot: int, plan: Plan, length: int, root: int, drafts: Sequence[int] = ()) -> None:
        """Lay out the window of `plan` in `slot`, behind `length` cached entries. A draft row without a draft gets id
        V, which no sample equals."""
        if len(drafts) > plan.drafts:
            raise ValueError(f"{plan.name} has no room for {len(drafts)} drafts")
        vocab = self.capabilities.vocab_size
        ids = np.zeros(self.bindings.window(plan), np.int64)
        ids[: plan.width] = [root, *drafts, *[vocab] * (plan.drafts - len(drafts)), *plan.lookahead_ids(vocab)]
        self.buffers.write_row("input_ids", slot, ids, np.int64)
        self._set_slot(slot, length, active=True)
        if plan.drafts and self.manifest.rule == "rejection":
            # A draft from elsewhere was certain to be drawn; one that is missing could not be.
            certain = ids[1 : 1 + plan.drafts, None] == np.arange(vocab)
            self.buffers.write_row("draft_probs", slot, certain, np.float32)

    def _set_slot(self, slot: int, length: int, *, active: bool) -> None:
        self.buffers.write_row("length", slot, length, np.int64)
        self.buffers.write_row("active", slot, active, np.int64)

    def prefill(self, slot: int, length: int, tokens: Sequence[int], width: int) -> None:
        """Write the K/V of `tokens` behind `length` entries of `slot`, in a window of `width` rows; the rows beyond the
        tokens are padding."""
        if not 0 < len(tokens) <= width:
            raise ValueError(f"{len(tokens)} tokens in a window of {width}")
        plan = prefill_plan(width)
        ids = np.zeros((1, self.bindings.window(plan)), np.int64)
        ids[0, : len(tokens)] = tokens
        self.buffers.write(f"{PREFILL}input_ids", ids)
        self.buffers.write(f"{PREFILL}length", np.array([length], np.int64))
        self.buffers.write(f"{PREFILL}logit_rows", np.array([len(tokens) - 1], np.int64))
        self._run_prefill(slot, plan)

    def run(self, kind: PassKind) -> list[list[int]]:
        """One pass: trunk and tail over the windows in place. The tokens emitted by each slot, none by a parked one;
        the windows of `kind.plan.next` are in place afterwards."""
        counts, emitted = self._run_pass(kind)
        return [row[:count] for row, count in zip(emitted.tolist(), counts.tolist(), strict=True)]

    def logprobs(self, kind: PassKind) -> Logprobs:
        """Of the tokens that the last pass emitted, which was of this `kind`."""
        shape = (kind.batch, kind.plan.max_emitted)
        most = min(MAX_LOGPROBS, self.capabilities.vocab_size)
        read = self.buffers.read
        return Logprobs(
            read("chosen_logprob", shape, np.float32),
            read("top_ids", (*shape, most), np.int64),
            read("top_logprobs", (*shape, most), np.float32),
        )

    def logits(self, plan: Plan, batch: int = 1) -> npt.NDArray[np.float32]:
        """[b,Q,V] logits of the last pass over `plan`. For checks, not for the loop."""
        logits: npt.NDArray[np.float32] = self.buffers.read(
            "logits", (batch, plan.width, self.capabilities.vocab_size), np.float32
        )
        return logits

    def close(self) -> None:  # noqa: B027 (most engines have nothing to do)
        """Give back what the device holds; harmless when repeated."""

    @abstractmethod
    def run_trunk(self, plan: Plan, batch: int) -> None:
        """The trunk alone over the windows in place, which stay: logits and K/V change."""

    @abstractmethod
    def run_tail(self, kind: PassKind) -> None:
        """The tail alone, on the logits in place."""

    @abstractmethod
    def _run_pass(self, kind: PassKind) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Trunk and tail; returns `count` [b] and `emitted` [b,E] on the host."""

    @abstractmethod
    def _run_prefill(self, slot: int, plan: Plan) -> None:
        """The trunk over the prefill window, on the cache of `slot`; only its K/V matter."""
