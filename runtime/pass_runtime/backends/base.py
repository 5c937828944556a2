"""A bundle's graphs over the slots of one device. The base class fills the buffers, a subclass runs the graphs.

A backend keeps no account of sequences: `pass_runtime.decode.runner` knows which sequence is in which slot, and how
much of it is cached. Everything that a pass needs is either in the buffers (written here, or by the graphs of the
previous pass) or in the KV cache. The backend repeats the lengths that the device has only to know which noise comes
next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.memory import Buffers, KVCache, Memory, NoiseRows
from pass_runtime.bundle.bindings import PREFILL, BundleBindings
from pass_runtime.bundle.manifest import Graph, Manifest
from pass_runtime.bundle.plan import MAX_LOOKAHEAD, MODES, Plan, full_tree, make_cycle, prefill_plan, verify_plan
from pass_runtime.bundle.request_fields import MAX_LOGPROBS
from pass_runtime.bundle.sampling import Sampler, SamplingParams
from pass_runtime.errors import PassError

DEFAULT_BATCH = 8
"""The number of slots where neither the user nor the engines set one."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. How engines differ is data here, not conditions elsewhere.

    capacities: the KV capacities S in tokens that the cache may have, in rising order.
    prefill_widths: the widths Q of prompt chunks in falling order, ending in 1. chunk_capacities: of wide ones, the
    largest KV capacity with which they are run, because of the memory that they need.
    batch_sizes: how many slots a pass may run over, in rising order; the last is the number of slots.
    same_entries: whether the K/V of a token are the same bits whatever window wrote them, a chunk of a prompt or a
    chain of any width; those of second choices in trees are excepted.
    least_width: narrower windows are padded to this many rows.
    keeps_graphs: whether passes are repeated as captured graphs, which stay good when the KV capacity changes.
    listed: N, the number of positions whose noise the tails' inputs list; 0 is as many as the largest capacity needs.
    lookahead: the only number of drafts that plans may have, with full groups; None allows any plan. trees: the numbers
    of drafts of the trees that there are. rounds_activations: whether activations are rounded to 8 bits.
    """

    device: str
    vocab_size: int
    capacities: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (1,)
    lookahead: int | None = None
    trees: tuple[int, ...] = ()
    rounds_activations: bool = False
    same_entries: bool = False
    least_width: int = 1
    noise_positions: int = 0
    keeps_graphs: bool = False
    chunk_capacities: Mapping[int, int] = field(default_factory=dict, hash=False)

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

    @property
    def exact_trees(self) -> tuple[int, ...]:
        """The numbers of drafts of the trees that may run: none if activations are rounded to 8 bits. The last bits of
        a row depend on its place in the window, and would decide what is rounded up: a tree, whose accepted drafts may
        stand elsewhere than in plain decoding, could write another text, also for neighbours in the batch."""
        return () if self.rounds_activations else self.trees

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

    def chunks(self, start: int, capacity: int) -> list[int]:
        """The widths of the chunks that may follow `start` tokens of a prompt, in falling order. capacity: the KV
        capacity as it is now; it grows where a chunk needs that."""

        def fits(width: int) -> bool:
            end = start + self.padded_width(width)
            if end > self.max_capacity:
                return False
            return max(capacity, self.capacity(end)) <= self.chunk_capacities.get(width, self.max_capacity)

        return [width for width in self.prefill_widths if fits(width)]

    def allows(self, plans: Sequence[Plan]) -> bool:
        """Whether there are engines for all of `plans`."""
        if self.lookahead is None:
            return True
        chains = {plan for mode in MODES for plan in make_cycle(mode, self.lookahead).plans}
        return set(plans) <= chains | {full_tree(size, self.lookahead) for size in self.trees}

    def verify_plan(self, drafts: int) -> Plan:
        """The plan that verifies `drafts` drafts, which may have more draft rows than that."""
        return verify_plan(drafts if self.lookahead is None else self.lookahead)


@dataclass(frozen=True)
class PassKind:
    """What a pass runs: a plan over the first `batch` slots, and the graphs that follow the trunk.

    touched: the length of the lists of tokens that the logits processors read; 0 where there are no processors.
    processed_logprobs: the log-probabilities are of what the processors wrote.
    """

    plan: Plan
    batch: int
    sampler: Sampler
    logprobs: bool = False
    touched: int = 0
    processed_logprobs: bool = False

    @property
    def tail_key(self) -> tuple[str, str, int, bool]:
        """What identifies its tail and the buffers of that."""
        return self.plan.name, self.sampler, self.batch, bool(self.touched)

    @property
    def logprobs_key(self) -> tuple[str, str, int, bool]:
        return self.plan.name, "logprobs", self.batch, bool(self.touched) and self.processed_logprobs


class ProcessedRows(NamedTuple):
    """What the logits processors do to one slot: see `pass_exporter.tails.processors`. P rows, lists of T tokens."""

    allowed: npt.NDArray[np.int32]
    """[P,V/8] bits in bytes."""
    touched: npt.NDArray[np.int64]
    """[T]"""
    bias: npt.NDArray[np.float32]
    """[T]"""
    factor: npt.NDArray[np.float32]
    """[P,T]"""
    penalty: npt.NDArray[np.float32]
    """[P,T]"""


class Emitted(NamedTuple):
    """What a pass emitted in one slot: tokens, and the rows of the window that they were drawn from."""

    tokens: list[int]
    rows: list[int]


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities after a pass: `chosen` [b,E] of the emitted tokens, and `values` [b,E,K] of the most likely
    tokens `ids` [b,E,K] in their places."""

    chosen: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class Backend(ABC):
    """Slots 0 .. capabilities.slots-1 of one bundle on one device."""

    def __init__(
        self, bundle: Path, manifest: Manifest, capabilities: Capabilities, memory: Memory, spare_entries: int = 0
    ) -> None:
        """spare_entries: as `DerivedTrunk` has them."""
        self.bundle, self.manifest, self.capabilities, self.memory = bundle, manifest, capabilities, memory
        self.bindings = BundleBindings(manifest, capabilities.positions, capabilities.least_width)
        self.buffers = Buffers(memory, capabilities.slots, self.bindings.transient)
        self.cache = KVCache(memory, manifest, capabilities.slots, spare_entries)
        self._noise = NoiseRows(self.buffers, manifest.rule, capabilities.slots, capabilities.positions)
        self.captures: dict[str, str | None] = {}
        """Graphs or passes that were to be captured as a CUDA graph, on a device that has those: None where they were,
        else the reason why not."""
        # The lengths that the device has, None for masked slots.
        self._lengths: list[int | None] = [None] * capabilities.slots

    @property
    def capacity(self) -> int:
        """The KV capacity in tokens that passes have now."""
        return self.cache.capacity

    @property
    def processors(self) -> Graph:
        """The graph of logits processors."""
        if (graph := self.manifest.processors) is None:
            raise PassError("the bundle has no logits processors; export it again with this version")
        return graph

    @property
    def uncaptured(self) -> dict[str, str]:
        """Those that could not be captured, with the reason. They are slow to start, so extra rows seem to cost less
        than they do."""
        known = self.captures.copy()  # Servers ask for it while passes add to it.
        return {name: why for name, why in known.items() if why is not None}

    @property
    def failure(self) -> PassError | None:
        """The error after which the device, and so this backend, does no more work; None while it works."""
        return self.memory.failure

    def for_this_thread(self) -> AbstractContextManager[None]:
        """A context for every thread that runs passes, other than the one that opened or closes the backend."""
        return self.memory.for_this_thread()

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        """Change the KV capacity to `capacity` tokens, keeping the first `lengths[slot]` entries of every slot. Where
        it fails, nothing has changed."""
        self.cache.resize(capacity, lengths)

    def set_sampling(self, slot: int, params: SamplingParams) -> None:
        """Set how the tokens of `slot` are sampled."""
        write = self.buffers.write_row
        self._noise.begin(slot, None if params.sampler == "greedy" else params.seed or 0)
        write("temperature", slot, params.temperature, np.float32)
        write("top_k", slot, params.top_k, np.int64)
        write("top_p", slot, params.top_p, np.float32)
        write("min_p", slot, params.min_p, np.float32)

    def mask(self, slot: int, length: int) -> None:
        """Leave `slot` out of the following passes. They still write K/V after its `length` entries, and nothing
        else."""
        self._set_slot(slot, length, active=False)

    def stage(self, slot: int, plan: Plan, length: int, root: int, drafts: Sequence[int] = ()) -> None:
        """Write the window of `plan` for `slot`, whose cache holds `length` entries. `drafts` are a chain. A draft row
        without a draft gets the id V, which no sampled token equals."""
        if len(drafts) > plan.depth:
            raise ValueError(f"{plan.name} has no room for {len(drafts)} drafts")
        vocab = self.capabilities.vocab_size
        ids = np.zeros(self.bindings.padded_width(plan), np.int64)
        ids[: plan.width] = [root, *drafts, *[vocab] * (plan.drafts - len(drafts)), *plan.lookahead_ids(vocab)]
        self.buffers.write_row("input_ids", slot, ids, np.int64)
        self._set_slot(slot, length, active=True)
        if plan.drafts and self.manifest.rule == "rejection":
            # The draft probabilities are 1 for a given draft, and 0 for every token where there is no draft.
            certain = ids[1 : 1 + plan.drafts, None] == np.arange(vocab)
            self.buffers.write_row("draft_probs", slot, certain, np.float32)

    def drafts(self, plan: Plan, batch: int) -> list[list[int]]:
        """The drafts in the staged windows of `plan`, for the first `batch` slots; V stands for none."""
        if not plan.drafts:
            return [[] for _ in range(batch)]
        windows = self.buffers.read("input_ids", (batch, self.bindings.padded_width(plan)), np.int64)
        return [window[1 : 1 + plan.drafts] for window in windows.tolist()]

    def set_processors(self, slot: int, rows: ProcessedRows) -> None:
        """Set what the logits processors do to `slot` in the next pass."""
        for name, values in rows._asdict().items():
            self.buffers.write_row(name, slot, values, values.dtype)

    def _set_slot(self, slot: int, length: int, *, active: bool) -> None:
        self.buffers.write_row("length", slot, length, np.int64)
        self.buffers.write_row("active", slot, active, np.int64)
        self._lengths[slot] = length if active else None

    def prefill(self, slot: int, length: int, tokens: Sequence[int], width: int) -> None:
        """Append the K/V of `tokens` to the `length` entries of `slot`, in a window of `width` rows. The rows after the
        tokens are padding."""
        if not 0 < len(tokens) <= width:
            raise ValueError(f"{len(tokens)} tokens in a window of {width}")
        plan = prefill_plan(width)
        ids = np.zeros((1, self.bindings.padded_width(plan)), np.int64)
        ids[0, : len(tokens)] = tokens
        self.buffers.write(f"{PREFILL}input_ids", ids)
        self.buffers.write(f"{PREFILL}length", np.array([length], np.int64))
        self.buffers.write(f"{PREFILL}logit_rows", np.array([len(tokens) - 1], np.int64))
        self._run_prefill(slot, plan)

    def run(self, kind: PassKind) -> list[Emitted]:
        """Run one pass, trunk and tail, over the staged windows, and return what each slot emitted; a masked slot emits
        nothing. Afterwards the K/V of the accepted rows are part of the cache, and the windows of `kind.plan.next` are
        staged."""
        for slot, length in enumerate(self._lengths[: kind.batch]):
            if length is not None:  # noise up to the last position that a window of the plan can reach
                self._noise.cover(slot, length, length + listed_positions(kind.plan.width))
        found = {name: array.tolist() for name, array in self._run_pass(kind).items()}
        chain = [list(range(kind.plan.max_emitted))] * kind.batch
        every = zip(found["count"], found["emitted"], found.get("emitted_rows", chain), strict=True)
        emitted = [Emitted(tokens[:count], rows[:count]) for count, tokens, rows in every]
        for slot, each in enumerate(emitted):
            if (length := self._lengths[slot]) is not None:
                self.cache.keep_rows(slot, length, each.rows)
                self._lengths[slot] = length + len(each.tokens)
        return emitted

    @staticmethod
    def result_shapes(kind: PassKind) -> dict[str, tuple[int, ...]]:
        """The outputs of a pass's tail that the host reads, all int64, with their shapes."""
        emitted = (kind.batch, kind.plan.max_emitted)
        return {"count": (kind.batch,), "emitted": emitted} | ({"emitted_rows": emitted} if kind.plan.parents else {})

    def logprobs(self, kind: PassKind) -> Logprobs:
        """The log-probabilities of the tokens that the last pass emitted. `kind` is what that pass ran."""
        shape = (kind.batch, kind.plan.max_emitted)
        most = min(MAX_LOGPROBS, self.capabilities.vocab_size)
        read = self.buffers.read
        return Logprobs(
            read("chosen_logprob", shape, np.float32),
            read("top_ids", (*shape, most), np.int64),
            read("top_logprobs", (*shape, most), np.float32),
        )

    def logits(self, plan: Plan, batch: int = 1) -> npt.NDArray[np.float32]:
        """The logits [b,Q,V] of the last pass over `plan`. Only checks read them."""
        logits: npt.NDArray[np.float32] = self.buffers.read(
            "logits", (batch, plan.width, self.capabilities.vocab_size), np.float32
        )
        return logits

    def save_kernels(self) -> None:  # noqa: B027 (most engines compile nothing)
        """Keep what was compiled at run time for the next process, before this one ends."""

    def close(self) -> None:  # noqa: B027 (a backend may have nothing to free)
        """Free the device's memory. Repeated calls do nothing."""

    @abstractmethod
    def run_trunk(self, plan: Plan, batch: int) -> None:
        """Run the trunk alone over the staged windows. It changes logits and K/V, and the windows stay."""

    @abstractmethod
    def run_tail(self, kind: PassKind) -> None:
        """Run the tail alone, on the logits of the last pass."""

    @abstractmethod
    def _run_pass(self, kind: PassKind) -> Mapping[str, npt.NDArray[np.int64]]:
        """Run trunk and tail; return `result_shapes(kind)` on the host."""

    @abstractmethod
    def _run_prefill(self, slot: int, plan: Plan) -> None:
        """Run the trunk over the prefill window on the cache of `slot`, for its K/V alone."""


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
