"""`Backend`, which runs a bundle's graphs over the slots of one device. This base class fills the
buffers; a subclass for each engine runs the graphs.

All inputs of a pass are in the buffers (written by the host, or by the graphs of the previous pass)
or in the KV cache. `pass_runtime.decode.runner` decides which sequence is in which slot. The
backend has a copy of the slots' cached lengths, to fill the noise, and to move the K/V of accepted
rows next to each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.memory import Buffers, KVCache, Memory, NoiseRows
from pass_runtime.bundle.bindings import PREFILL, BundleBindings
from pass_runtime.bundle.manifest import Graph, Manifest
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.plan import (
    MAX_LOOKAHEAD,
    MODES,
    Plan,
    full_tree,
    make_cycle,
    prefill_plan,
    verify_plan,
)
from pass_runtime.bundle.request_fields import MAX_LOGPROBS
from pass_runtime.bundle.sampling import Sampler, SamplingParams
from pass_runtime.errors import OfOneProcess, PassError

DEFAULT_BATCH = 8
"""The number of slots if neither the user nor the engines set one."""
MAX_SCORED_ROWS = 64
"""The most rows of a prompt chunk that may all get logits, which take V numbers each."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. Code outside the backends reads from here how they differ.

    device: "cpu", "cuda", or the engines' library and its version.
    capacities: the KV capacities in tokens that the cache may have, in rising order.
    prefill_widths: the widths (rows) of prompt chunks, in falling order, ending in 1.
    scored_widths: those of prompt chunks that are scored (see `Backend.prefill`).
    chunk_capacities: width of a chunk -> the largest KV capacity with which it may run. It lists
    wide chunks, whose memory grows with the capacity; other chunks run with every capacity.
    batch_sizes: how many slots a pass may run over, in rising order, up to the number of slots.
    fixed_lookahead: if engines were built for one look-ahead, the number of drafts of every chain
    and of rows of every look-ahead group; None allows any plan.
    trees: the sizes, in drafts, of the trees that there are tails for.
    rounds_activations: whether activations are rounded to 8 bits.
    same_entries: whether a token's K/V have the same bits whatever prompt chunk or chain writes
    them. In a tree, only those of the first `Plan.depth` drafts, the chain of the most likely ones,
    are sure to have these bits too.
    least_width: narrower windows are padded to this many rows.
    kernels: whose kernels run the trunk: a variant of ours (`ort.kernels`), or the library's name.
    engine_positions: the `noise_positions` that the engines were built for; 0 if they follow from
    the largest KV capacity.
    keeps_graphs: whether passes run as captured CUDA graphs that stay valid when the KV capacity
    changes.
    """

    device: str
    vocab_size: int
    capacities: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (1,)
    fixed_lookahead: int | None = None
    trees: tuple[int, ...] = ()
    rounds_activations: bool = False
    same_entries: bool = False
    least_width: int = 1
    kernels: str = ""
    engine_positions: int = 0
    keeps_graphs: bool = False
    scored_widths: tuple[int, ...] = (1,)
    chunk_capacities: Mapping[int, int] = field(default_factory=dict, hash=False)  # dicts have none

    @property
    def slots(self) -> int:
        return self.batch_sizes[-1]

    @property
    def max_capacity(self) -> int:
        return self.capacities[-1]

    @property
    def noise_positions(self) -> int:
        """N, the number of positions that the tails' noise inputs list."""
        return self.engine_positions or listed_positions(self.max_capacity)

    @property
    def exact_trees(self) -> tuple[int, ...]:
        """The sizes of the trees that cannot change texts: `trees`, or none if activations are
        rounded to 8 bits. The last bits of a value depend on its row in the window, and a tree's
        accepted drafts may be in other rows than in plain decoding. So a value may be rounded to
        another code, which can change the text, also of other sequences in the batch."""
        return () if self.rounds_activations else self.trees

    def batch_size(self, slots: int) -> int:
        """Return the smallest batch size of at least `slots` slots."""
        return next(size for size in self.batch_sizes if size >= slots)

    def capacity(self, tokens: int) -> int:
        """Return the smallest KV capacity of at least `tokens`. Raises ValueError without one."""
        if tokens > self.max_capacity:
            raise ValueError(f"{tokens} tokens do not fit a KV capacity of {self.max_capacity}")
        return next(size for size in self.capacities if size >= tokens)

    def padded_width(self, width: int) -> int:
        """Return the rows of a window of `width` rows with its padding. Each of these rows writes
        an entry of the KV cache."""
        return max(width, self.least_width)

    def chunks(self, start: int, capacity: int, *, scored: bool = False) -> list[int]:
        """Return the widths of the chunks that may follow the first `start` tokens of a prompt, in
        falling order. capacity: the present KV capacity in tokens, which a long chunk raises.
        scored: whether the chunks are scored."""

        def fits(width: int) -> bool:
            end = start + self.padded_width(width)
            if end > self.max_capacity:
                return False
            return max(capacity, self.capacity(end)) <= self.chunk_capacities.get(
                width, self.max_capacity
            )

        widths = self.scored_widths if scored else self.prefill_widths
        return [width for width in widths if fits(width)]

    def allows(self, plans: Sequence[Plan]) -> bool:
        """Whether the backend can run all of `plans`."""
        if self.fixed_lookahead is None:
            return True
        chains = {plan for mode in MODES for plan in make_cycle(mode, self.fixed_lookahead).plans}
        trees = {full_tree(size, self.fixed_lookahead) for size in self.trees}
        return set(plans) <= chains | trees

    def verify_plan(self, drafts: int) -> Plan:
        """Return a plan that verifies `drafts` drafts. It may have more draft rows than that."""
        return verify_plan(drafts if self.fixed_lookahead is None else self.fixed_lookahead)


@dataclass(frozen=True)
class PassKind:
    """What a pass runs: a plan over the first `batch` slots, and the graphs that follow the trunk.

    touched: T, the length of the token lists in `ProcessedRows`; 0 runs no logits processors, so
    that `ProcessedRows.allowed` is ignored too. logprobs: whether to compute log-probabilities, of
    the processed logits if `processed_logprobs`, else of the trunk's.
    """

    plan: Plan
    batch: int
    sampler: Sampler
    logprobs: bool = False
    touched: int = 0
    processed_logprobs: bool = False

    @property
    def tail_key(self) -> tuple[str, str, int, bool]:
        """Identifies the tail and the buffers that it is bound to."""
        return self.plan.name, self.sampler, self.batch, bool(self.touched)

    @property
    def logprobs_key(self) -> tuple[str, str, int, bool]:
        """Identifies the graph of log-probabilities and its buffers. The last item is whether the
        graph reads processed logits."""
        return (
            self.plan.name,
            "logprobs",
            self.batch,
            bool(self.touched) and self.processed_logprobs,
        )


class ProcessedRows(NamedTuple):
    """What the logits processors do to one slot (`pass_exporter.tails.processors`). P: the number
    of root and draft rows. T: the length of the lists of tokens."""

    allowed: npt.NDArray[np.int32]
    """[P,V/8 rounded up] the tokens that may be drawn: token i if bit i % 8 of number i // 8 is
    set. The higher bits are unused."""
    touched: npt.NDArray[np.int64]
    """[T] ids of the tokens whose logits the next three fields change."""
    bias: npt.NDArray[np.float32]
    """[T] numbers that are added to the logits of these tokens."""
    factor: npt.NDArray[np.float32]
    """[P,T] numbers that then divide positive logits, and multiply negative ones."""
    penalty: npt.NDArray[np.float32]
    """[P,T] numbers that are then subtracted."""


class Emitted(NamedTuple):
    """The tokens that a pass emitted in one slot, and the window row that each was drawn from."""

    tokens: list[int]
    rows: list[int]


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of a pass over b slots that emits up to E tokens in each: `chosen` [b,E] of
    these tokens, and `values` [b,E,K] of the K likeliest tokens `ids` [b,E,K] at each position. Of
    a prompt chunk (b is 1), those of the token that follows each row."""

    chosen: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


class Backend(OfOneProcess, ABC):
    """Slots 0 .. capabilities.slots-1 of one bundle on one device."""

    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        capabilities: Capabilities,
        memory: Memory,
        files: OpenFiles,
    ) -> None:
        """files: the graphs or engines, and their data."""
        self.bundle = bundle
        self.files = files
        self.manifest = manifest
        self.capabilities = capabilities
        self.memory = memory
        self.bindings = BundleBindings(
            manifest, capabilities.noise_positions, capabilities.padded_width
        )
        self.buffers = Buffers(memory, capabilities.slots, self.bindings.transient)
        self.cache = KVCache(memory, manifest, capabilities.slots)
        self._noise = NoiseRows(
            self.buffers, manifest.rule, capabilities.slots, capabilities.noise_positions
        )
        self.captures: dict[str, str | None] = {}
        """Name of a graph file or of a pass -> None if it was captured as a CUDA graph, else the
        reason why not. Empty on a device without CUDA graphs."""
        # The cached length of each slot, as the device has it; None for masked slots.
        self._lengths: list[int | None] = [None] * capabilities.slots

    @property
    def capacity(self) -> int:
        """The present KV capacity, in tokens."""
        return self.cache.capacity

    @property
    def processors(self) -> Graph:
        """The graph of logits processors. Raises PassError if the bundle has none."""
        if (graph := self.manifest.processors) is None:
            raise PassError(
                "the bundle has no logits processors; export it again with this version"
            )
        return graph

    @property
    def uncaptured(self) -> dict[str, str]:
        """The entries of `captures` that were not captured: name -> reason. Launching their kernels
        one by one takes so long that it hides a part of what extra rows cost."""
        captures = self.captures.copy()  # Another thread may run passes, which add to `captures`.
        return {name: reason for name, reason in captures.items() if reason is not None}

    @property
    def failure(self) -> PassError | None:
        """The error after which this backend no longer works, as the device is lost or a file was
        written; else None."""
        return self.memory.failure or self.files.failure

    def for_this_thread(self) -> AbstractContextManager[None]:
        """A context that makes the device current for the calling thread. A thread must hold it to
        run passes, but not to open or close the backend."""
        return self.memory.for_this_thread()

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        """Change the KV capacity to `capacity` tokens, keeping the first `lengths[slot]` entries of
        every slot. If it fails, nothing has changed."""
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
        """Mask `slot`: the following passes emit nothing in it. They may overwrite its K/V after
        the first `length` entries, and nothing else."""
        self._set_slot(slot, length, active=False)

    def stage(
        self, slot: int, plan: Plan, length: int, root: int, drafts: Sequence[int] = ()
    ) -> None:
        """Write the window of `plan` for `slot`, whose cache holds `length` entries. drafts: a
        chain of at most `plan.depth`. A draft row without a draft gets the id V (the vocabulary
        size), which no sampled token equals. Raises ValueError if there are too many drafts."""
        if len(drafts) > plan.depth:
            raise ValueError(f"{plan.name} has no room for {len(drafts)} drafts")
        vocab = self.capabilities.vocab_size
        ids = np.zeros(self.capabilities.padded_width(plan.width), np.int64)
        ids[: plan.width] = [
            root,
            *drafts,
            *[vocab] * (plan.drafts - len(drafts)),
            *plan.lookahead_ids(vocab),
        ]
        self.buffers.write_row("input_ids", slot, ids, np.int64)
        self._set_slot(slot, length, active=True)
        if plan.drafts and self.manifest.rule == "rejection":
            # A draft has probability 1 and all other tokens 0; without a draft, all tokens have 0.
            draft_probs = ids[1 : 1 + plan.drafts, None] == np.arange(vocab)
            self.buffers.write_row("draft_probs", slot, draft_probs, np.float32)

    def drafts(self, plan: Plan, batch: int) -> list[list[int]]:
        """Return the drafts in the staged windows of the first `batch` slots, all of `plan`. The id
        V stands for no draft."""
        if not plan.drafts:
            return [[] for _ in range(batch)]
        width = self.capabilities.padded_width(plan.width)
        windows = self.buffers.read("input_ids", (batch, width), np.int64)
        return [window[1 : 1 + plan.drafts] for window in windows.tolist()]

    def set_processors(self, slot: int, rows: ProcessedRows) -> None:
        """Set what the logits processors do to `slot` in the next pass."""
        for name, values in rows._asdict().items():
            self.buffers.write_row(name, slot, values, values.dtype)

    def _set_slot(self, slot: int, length: int, *, active: bool) -> None:
        self.buffers.write_row("length", slot, length, np.int64)
        self.buffers.write_row("active", slot, active, np.int64)
        self._lengths[slot] = length if active else None

    def prefill(
        self,
        slot: int,
        length: int,
        tokens: Sequence[int],
        width: int,
        following: Sequence[int] = (),
    ) -> Logprobs | None:
        """Write the K/V of `tokens` after the first `length` entries of `slot`, with a window that
        is padded to `width` rows. Raises ValueError if the window is too narrow.

        following: the tokens that follow each of `tokens` in the prompt. The chunk is then scored:
        this returns their log-probabilities."""
        if not 0 < len(tokens) <= width:
            raise ValueError(
                f"a prefill window of {width} rows takes 1 to {width} tokens, not {len(tokens)}"
            )
        plan = prefill_plan(width)
        ids = np.zeros((1, self.capabilities.padded_width(width)), np.int64)
        ids[0, : len(tokens)] = tokens
        self.buffers.write(f"{PREFILL}input_ids", ids)
        self.buffers.write(f"{PREFILL}length", np.array([length], np.int64))
        if not following:
            self.buffers.write(f"{PREFILL}logit_rows", np.array([len(tokens) - 1], np.int64))
            self._run_prefill(slot, plan, scored=False)
            return None
        emitted = np.zeros((1, width), np.int64)
        emitted[0, : len(tokens)] = following
        self.buffers.write(f"{PREFILL}emitted", emitted)
        self._run_prefill(slot, plan, scored=True)
        return self._read_logprobs(1, width, PREFILL)

    def run(self, kind: PassKind) -> list[Emitted]:
        """Run one pass, trunk and tail, over the staged windows. Return what each of `kind.batch`
        slots emitted; a masked slot emits nothing. Afterwards the K/V of the accepted rows belong
        to the cached text, and the windows of `kind.plan.next` are staged."""
        for slot, length in enumerate(self._lengths[: kind.batch]):
            if length is not None:
                # The end is the last position that a window of the plan can reach.
                self._noise.cover(slot, length, length + listed_positions(kind.plan.width))
        outputs = {name: array.tolist() for name, array in self._run_pass(kind).items()}
        # The tails of chains do not say from which rows tokens were drawn: they are 0, 1, 2, ...
        chain_rows = [list(range(kind.plan.max_emitted))] * kind.batch
        emitted_rows = outputs.get("emitted_rows", chain_rows)
        by_slot = zip(outputs["count"], outputs["emitted"], emitted_rows, strict=True)
        results = [Emitted(tokens[:count], rows[:count]) for count, tokens, rows in by_slot]
        for slot, emitted in enumerate(results):
            if (length := self._lengths[slot]) is not None:
                self.cache.keep_rows(slot, length, emitted.rows)
                self._lengths[slot] = length + len(emitted.tokens)
        return results

    @staticmethod
    def result_shapes(kind: PassKind) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tail's outputs that the host reads, by name. All are int64."""
        emitted = (kind.batch, kind.plan.max_emitted)
        return {"count": (kind.batch,), "emitted": emitted} | (
            {"emitted_rows": emitted} if kind.plan.parents else {}
        )

    def logprobs(self, kind: PassKind) -> Logprobs:
        """Return the log-probabilities for the last pass, which was of this `kind`."""
        return self._read_logprobs(kind.batch, kind.plan.max_emitted)

    def _read_logprobs(self, batch: int, count: int, scope: str = "") -> Logprobs:
        """Read `count` log-probabilities for each slot. scope: as for `BundleBindings.logprobs`."""
        shape, top = (batch, count), min(MAX_LOGPROBS, self.capabilities.vocab_size)
        read = partial(self.buffers.read, by_slot=not scope)
        return Logprobs(
            read(f"{scope}chosen_logprob", shape, np.float32),
            read(f"{scope}top_ids", (*shape, top), np.int64),
            read(f"{scope}top_logprobs", (*shape, top), np.float32),
        )

    def logits(self, plan: Plan, batch: int = 1) -> npt.NDArray[np.float32]:
        """Return the logits [batch,plan.width,V] of the last pass, which ran `plan`. Decoding does
        not need logits on the host."""
        return self.buffers.read(
            "logits", (batch, plan.width, self.capabilities.vocab_size), np.float32
        )

    def save_kernels(self) -> None:
        """Save kernels that were compiled at run time, so that later processes need not do it."""

    def close(self) -> None:
        """Free the device's memory. Repeated calls do nothing."""

    @abstractmethod
    def run_trunk(self, plan: Plan, batch: int) -> None:
        """Run the trunk alone over the staged windows. It writes logits and K/V."""

    @abstractmethod
    def run_tail(self, kind: PassKind) -> None:
        """Run the tail alone, on the logits that the last `run_trunk` wrote."""

    @abstractmethod
    def _run_pass(self, kind: PassKind) -> Mapping[str, npt.NDArray[np.int64]]:
        """Run trunk and tail. Return the outputs that `result_shapes` lists, on the host."""

    @abstractmethod
    def _run_prefill(self, slot: int, plan: Plan, *, scored: bool) -> None:
        """Run the trunk over the prefill window on the cache of `slot`, for the K/V alone; if
        `scored`, for the logits of all rows too, and then the graph of log-probabilities."""


def listed_positions(entries: int) -> int:
    """Return N, the number of positions that noise inputs list for a cache of `entries` entries:
    one more for the token after the last entry, and MAX_LOOKAHEAD more for the look-ahead group
    that follows it in a fused window."""
    return entries + 1 + MAX_LOOKAHEAD


def doublings(maximum: int, first: int = 1) -> tuple[int, ...]:
    """Return `first`, `first` * 2, `first` * 4, ... below `maximum`, and then `maximum`."""
    sizes, size = [], first
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)


def check_onnx_runtime(bundle: Path, manifest: Manifest) -> None:
    """Raise PassError if ONNX Runtime cannot run the bundle on any machine."""
    if manifest.model.dtype == "bfloat16":
        raise PassError(
            f"bf16 bundles run on TensorRT engines: run pass-export build {bundle} --engine "
            "tensorrt; for ONNX Runtime export with --dtype fp16 or fp32"
        )
