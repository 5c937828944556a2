"""Runs a bundle's graphs over the slots of one device; subclasses are the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.memory import Buffers, KVCache, Memory, NoiseRows
from pass_runtime.bundle.bindings import PREFILL, BundleBindings
from pass_runtime.bundle.manifest import Graph, Manifest
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.plan import plan_windows
from pass_runtime.bundle.sampling import MAX_LOGPROBS, TAIL_OPTIONS, Sampler, SamplingParams
from pass_runtime.bundle.window import (
    MAX_LOOKAHEAD,
    Window,
    prefill_window,
)
from pass_runtime.errors import OfOneProcess, PassError

DEFAULT_BATCH = 8
MAX_SCORED_ROWS = 64
"""A scored prompt chunk needs V logits for each row."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. Code outside the backends reads from here how they differ.

    device: "cpu", "cuda", or the engines' library and version. capacities: in tokens, rising.
    prefill_widths, scored_widths: rows of prompt chunks, falling to 1. chunk_capacities: width
    -> the largest KV capacity of a wide chunk. fixed_lookahead: the L of engines; None allows
    any window. same_entries: K/V have the same bits whatever chunk or window writes them.
    least_width: narrower windows are padded. kernels: our variant, or a library's name.
    engine_positions: `noise_positions` of engines; 0 derives them. keeps_graphs: CUDA graphs
    stay valid when the KV capacity changes. verifying: windows for drafts of n-grams and
    grammars, by rising numbers of drafts.
    """

    device: str
    vocab_size: int
    capacities: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (1,)
    fixed_lookahead: int | None = None
    same_entries: bool = False
    least_width: int = 1
    kernels: str = ""
    engine_positions: int = 0
    keeps_graphs: bool = False
    scored_widths: tuple[int, ...] = (1,)
    chunk_capacities: Mapping[int, int] = field(default_factory=dict, hash=False)
    verifying: tuple[Window, ...] = ()

    @property
    def slots(self) -> int:
        return self.batch_sizes[-1]

    @cached_property
    def max_capacity(self) -> int:
        return self.capacities[-1]

    @property
    def noise_positions(self) -> int:
        """N, the positions in the tails' noise inputs."""
        return self.engine_positions or listed_positions(self.max_capacity)

    def batch_size(self, slots: int) -> int:
        return next(size for size in self.batch_sizes if size >= slots)

    def capacity(self, tokens: int) -> int:
        """Return the smallest KV capacity for `tokens`. Raises ValueError without one."""
        if tokens > self.max_capacity:
            raise ValueError(f"{tokens} tokens do not fit a KV capacity of {self.max_capacity}")
        return next(size for size in self.capacities if size >= tokens)

    def padded_width(self, width: int) -> int:
        return max(width, self.least_width)

    def chunks(self, start: int, capacity: int, *, scored: bool = False) -> list[int]:
        """Return the widths, falling, of chunks after `start` prompt tokens. capacity: the
        present one, which a long chunk raises."""

        def fits(width: int) -> bool:
            end = start + self.padded_width(width)
            if end > self.max_capacity:
                return False
            return max(capacity, self.capacity(end)) <= self.chunk_capacities.get(
                width, self.max_capacity
            )

        widths = self.scored_widths if scored else self.prefill_widths
        return [width for width in widths if fits(width)]

    def allows(self, windows: Sequence[Window]) -> bool:
        return self.fixed_lookahead is None or self._fixed_windows.issuperset(windows)

    @cached_property
    def _fixed_windows(self) -> frozenset[Window]:
        assert self.fixed_lookahead is not None
        return frozenset([*self.verifying, *plan_windows(self.fixed_lookahead)])


class Drafts(NamedTuple):
    """confidence: of n-grams, as in `CopyIndex.propose`."""

    tokens: tuple[int, ...]
    source: Literal["grammar", "ngram"]
    confidence: int = 0


LogprobsMode = Literal["raw", "processed"]


@dataclass(frozen=True)
class Batch:
    """A pass over the first `size` slots; those not in `slots` are masked. drafts: None keeps a
    slot's window. touched: T of `ProcessedRows`; 0 runs no processors. logprobs: before or after
    processors."""

    window: Window
    size: int
    sampler: Sampler
    slots: tuple[int, ...] = ()
    drafts: tuple[Drafts | None, ...] = ()
    touched: int = 0
    logprobs: LogprobsMode | None = None

    @property
    def reads_processed(self) -> bool:
        return bool(self.touched) and self.logprobs == "processed"


class ProcessedRows(NamedTuple):
    """For one slot with P root and draft rows.

    allowed: [P,V/8 rounded up], bit i % 8 of number i // 8: token i may be drawn. touched: [T]
    ids, whose logits get bias [T] added, then factor [P,T] divides positive and multiplies
    negative ones, then penalty [P,T] is subtracted.
    """

    allowed: npt.NDArray[np.int32]
    touched: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    factor: npt.NDArray[np.float32]
    penalty: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Logprobs:
    """`chosen` [b,E] of the emitted tokens, `values` [b,E,K] of the likeliest `ids` [b,E,K]; for
    a prompt chunk, of the token after each row."""

    chosen: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True)
class PassResult:
    """tokens: by slot; none of a masked slot."""

    tokens: list[list[int]]
    logprobs: Logprobs | None


class Backend(OfOneProcess, ABC):
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
        self.capacity = 0
        self.captures: dict[str, str | None] = {}
        """Graph file or pass -> why it was not captured as a CUDA graph, or None."""
        # On the device; None for masked slots.
        self._lengths: list[int | None] = [None] * capabilities.slots

    @property
    def uncaptured(self) -> dict[str, str]:
        """name -> reason"""
        captures = self.captures.copy()  # another thread may add to it
        return {name: reason for name, reason in captures.items() if reason is not None}

    @property
    def failure(self) -> PassError | None:
        """The error after which the backend no longer works: the device is lost or a file was
        written."""
        return self.memory.failure or self.files.failure

    def for_this_thread(self) -> AbstractContextManager[None]:
        """Make the device current for the thread. Only passes need it."""
        return self.memory.for_this_thread()

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        """Change the KV capacity, and keep `lengths[slot]` entries of each slot. If it fails,
        nothing has changed."""
        self.cache.resize(capacity, lengths)
        self.capacity = capacity

    def set_sampling(self, slot: int, params: SamplingParams) -> None:
        write = self.buffers.write_row
        self._noise.begin(slot, None if params.sampler == "greedy" else params.seed or 0)
        for each in TAIL_OPTIONS:
            dtype = np.int64 if each.type is int else np.float32
            write(each.name, slot, getattr(params, each.name), dtype)

    def mask(self, slot: int, length: int) -> None:
        """Leave `slot` out of passes, which may still write after `length` entries."""
        self._set_slot(slot, length, active=False)

    def stage(
        self, slot: int, window: Window, length: int, root: int, drafts: Sequence[int] = ()
    ) -> None:
        """Write `window` for `slot` with `length` entries. drafts: a chain. Raises ValueError
        for too many."""
        if len(drafts) > window.drafts:
            raise ValueError(f"{window.name} has no room for {len(drafts)} drafts")
        vocab = self.capabilities.vocab_size
        ids = np.zeros(self.capabilities.padded_width(window.width), np.int64)
        ids[: window.width] = [
            root,
            *drafts,
            *[vocab] * (window.drafts - len(drafts)),
            *window.lookahead_ids(vocab),
        ]
        self.buffers.write_row("input_ids", slot, ids, np.int64)
        self._set_slot(slot, length, active=True)
        if window.drafts and self.manifest.rule == "rejection":
            # A draft has probability 1; no draft, 0 for all tokens.
            draft_probs = ids[1 : 1 + window.drafts, None] == np.arange(vocab)
            self.buffers.write_row("draft_probs", slot, draft_probs, np.float32)

    def drafts(self, window: Window, batch: int) -> list[list[int]]:
        """Return the drafts in the staged windows of the first `batch` slots; V is no draft."""
        if not window.drafts:
            return [[] for _ in range(batch)]
        width = self.capabilities.padded_width(window.width)
        ids = self.buffers.read("input_ids", (batch, width), np.int64)
        return [row[1 : 1 + window.drafts] for row in ids.tolist()]

    def set_processors(self, slot: int, rows: ProcessedRows) -> None:
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
        """Write the K/V of `tokens` after `length` entries, padded to `width` rows; ValueError
        if that is too narrow. following: the next tokens, whose log-probabilities are returned."""
        if not 0 < len(tokens) <= width:
            raise ValueError(
                f"a prefill window of {width} rows takes 1 to {width} tokens, not {len(tokens)}"
            )
        window = prefill_window(width)
        ids = np.zeros((1, self.capabilities.padded_width(width)), np.int64)
        ids[0, : len(tokens)] = tokens
        self.buffers.write(f"{PREFILL}input_ids", ids)
        self.buffers.write(f"{PREFILL}length", np.array([length], np.int64))
        if not following:
            self.buffers.write(f"{PREFILL}logit_rows", np.array([len(tokens) - 1], np.int64))
            self._run_prefill(slot, window, scored=False)
            return None
        emitted = np.zeros((1, width), np.int64)
        emitted[0, : len(tokens)] = following
        self.buffers.write(f"{PREFILL}emitted", emitted)
        self._run_prefill(slot, window, scored=True)
        return self._read_logprobs(1, width, PREFILL)

    def run(self, batch: Batch) -> PassResult:
        """Run a pass over the staged windows, and stage those of `batch.window.next`."""
        for slot, length in enumerate(self._lengths[: batch.size]):
            if length is not None:
                # the next window reaches this far
                self._noise.cover(slot, length, length + listed_positions(batch.window.width))
        outputs = self._run_pass(batch)
        by_slot = zip(outputs["count"].tolist(), outputs["emitted"].tolist(), strict=True)
        tokens = [emitted[:count] for count, emitted in by_slot]
        for slot, emitted in enumerate(tokens):
            if (length := self._lengths[slot]) is not None:
                self._lengths[slot] = length + len(emitted)
        logprobs = None
        if batch.logprobs is not None:
            logprobs = self._read_logprobs(batch.size, batch.window.max_emitted)
        return PassResult(tokens, logprobs)

    def graphs_after_trunk(self, batch: Batch) -> list[tuple[Graph, int, bool]]:
        """Return in order the graphs that a pass runs after the trunk; T of the processors, else 0;
        and whether the graph reads processed logits."""
        tail = self.manifest.window(batch.window.tail).tails[batch.sampler]
        graphs = [(tail, 0, bool(batch.touched))]
        if batch.touched:
            graphs.insert(0, (self.manifest.processors, batch.touched, False))
        if batch.logprobs:
            graphs.append((self.manifest.logprobs, 0, batch.reads_processed))
        return graphs

    @staticmethod
    def result_shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
        return {"count": (batch.size,), "emitted": (batch.size, batch.window.max_emitted)}

    def _read_logprobs(self, batch: int, count: int, scope: str = "") -> Logprobs:
        shape, top = (batch, count), min(MAX_LOGPROBS, self.capabilities.vocab_size)
        read = partial(self.buffers.read, by_slot=not scope)
        return Logprobs(
            read(f"{scope}chosen_logprob", shape, np.float32),
            read(f"{scope}top_ids", (*shape, top), np.int64),
            read(f"{scope}top_logprobs", (*shape, top), np.float32),
        )

    def logits(self, window: Window, batch: int = 1) -> npt.NDArray[np.float32]:
        """Return the logits [batch,window.width,V] of the last pass, which ran `window`."""
        return self.buffers.read(
            "logits", (batch, window.width, self.capabilities.vocab_size), np.float32
        )

    def save_kernels(self) -> None:
        """Save kernels that were compiled at run time, for later processes."""

    def close(self) -> None:
        """Free the device's memory."""

    @abstractmethod
    def run_trunk(self, window: Window, batch: int) -> None:
        """Run the trunk alone over the staged windows."""

    @abstractmethod
    def run_tail(self, batch: Batch) -> None:
        """Run the tail alone on the logits of the last `run_trunk`."""

    @abstractmethod
    def _run_pass(self, batch: Batch) -> Mapping[str, npt.NDArray[np.int64]]:
        """Run trunk and tail."""

    @abstractmethod
    def _run_prefill(self, slot: int, window: Window, *, scored: bool) -> None:
        """scored: compute log-probabilities of all rows, too."""


def listed_positions(entries: int) -> int:
    """Return N: one more for the token after the last, and MAX_LOOKAHEAD for the look-ahead
    group after it."""
    return entries + 1 + MAX_LOOKAHEAD


def doublings(maximum: int, first: int = 1) -> tuple[int, ...]:
    """Return `first`, `first` * 2, ... below `maximum`, and `maximum`."""
    sizes, size = [], first
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)


def check_onnx_runtime(bundle: Path, manifest: Manifest) -> None:
    """Raise PassError if no machine's ONNX Runtime can run the bundle."""
    if manifest.model.dtype == "bfloat16":
        raise PassError(
            f"bf16 bundles run on TensorRT engines: run pass-export build {bundle} --engine "
            "tensorrt; for ONNX Runtime export with --dtype fp16 or fp32"
        )
