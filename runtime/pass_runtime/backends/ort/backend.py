"""ONNX Runtime: its sessions are bound to buffers on the device."""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.base import (
    DEFAULT_BATCH,
    MAX_SCORED_ROWS,
    Backend,
    Batch,
    Capabilities,
    check_onnx_runtime,
    doublings,
)
from pass_runtime.backends.memory import DeviceLost, Memory, wide_chunks
from pass_runtime.backends.open import split_device
from pass_runtime.backends.ort.session import (
    PROVIDERS,
    Kernels,
    Trunks,
    choose_device,
    cpu_kernels,
    log,
    open_memory,
    open_session,
    open_trunk,
)
from pass_runtime.bundle.bindings import PREFILL, Bindings
from pass_runtime.bundle.manifest import Graph, Manifest
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.tensors import PAST, PRESENT
from pass_runtime.bundle.window import Window
from pass_runtime.errors import PassError

FIRST_CAPACITY = 256
"""On CUDA, in tokens."""
CAPACITY_STEP = 64
"""On the CPU, in tokens: in the portable trunk, other numbers of masked entries change how sums
over all entries are rounded."""
PREFILL_WIDTHS = (256, 64, 16, 1)
"""GPUs also have `wide_chunks`."""


Key = TypeVar("Key", bound=Hashable)
OnFailure = Callable[[str], None]
"""Called with the reason why a run could not be captured."""

NO_GRAPH_ID = -1
"""ONNX Runtime then neither captures nor replays."""


@dataclass(frozen=True)
class BoundTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int


class BoundSession:
    """A session bound to memory. On CUDA, its run is captured as `graph_id` and replayed:
    addresses and shapes stay."""

    def __init__(
        self,
        session: ort.InferenceSession,
        device: str,
        inputs: Sequence[BoundTensor],
        outputs: Sequence[BoundTensor],
        kv_cache: tuple[Sequence[BoundTensor], Sequence[BoundTensor]],
        graph_id: int,
        memory: Memory,
        on_failure: OnFailure,
    ) -> None:
        self._session, self._memory, self._on_failure = session, memory, on_failure
        self._options = _run_options(graph_id)
        self._captures: bool = session.captures  # `open_session` sets this attribute
        self._binding = binding = session.io_binding()
        kind, ordinal = split_device(device)
        for bind, tensors in (
            (binding.bind_input, (*inputs, *kv_cache[0])),
            (binding.bind_output, (*outputs, *kv_cache[1])),
        ):
            for each in tensors:
                dtype = np.dtype(each.dtype)
                bind(each.name, PROVIDERS[kind][1], ordinal, dtype, each.shape, each.address)
        # but for the KV cache, where repeated runs write the same
        written = {tensor.address for tensor in outputs}
        self._overwritten = [tensor for tensor in inputs if tensor.address in written]

    def run(self) -> None:
        """Raises PassError if ONNX Runtime fails, and DeviceLost if that is the reason."""
        if self._captures:
            self._captures = False
            self._capture()
            return
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # onnxruntime raises bare classes of its own
            self._memory.check_device()
            raise PassError(
                f"onnxruntime failed to run a pass: {' '.join(str(error).split())}"
            ) from None

    def _capture(self) -> None:
        saved = [np.empty(tensor.shape, tensor.dtype) for tensor in self._overwritten]
        for array, tensor in zip(saved, self._overwritten, strict=True):
            self._memory.download(array, tensor.address)
        reason = None
        try:
            self.run()
        except DeviceLost:
            raise
        except PassError as error:
            reason, self._options = str(error), _run_options(NO_GRAPH_ID)
        if saved or reason is not None:  # The graph was executed three times, or not at all.
            for array, tensor in zip(saved, self._overwritten, strict=True):
                self._memory.upload(tensor.address, array)
            self.run()
        if reason is not None:
            self._on_failure(reason)


class BoundSessions(Generic[Key]):
    """The most recently used ones, by key. ONNX Runtime keeps captured graphs: the same
    addresses get their old graph id."""

    MAX_BOUND = 256
    _new_graph_ids = itertools.count(1)

    def __init__(self) -> None:
        self._bound: OrderedDict[Key, BoundSession] = OrderedDict()
        self._graph_ids: dict[Key, int] = {}

    def get(self, key: Key, make: Callable[[int], BoundSession]) -> BoundSession:
        """make: binds a session, given the graph id."""
        if key not in self._bound:
            self._bound[key] = make(self._graph_ids.setdefault(key, next(self._new_graph_ids)))
            if len(self._bound) > self.MAX_BOUND:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        return self._bound[key]

    def clear(self) -> None:
        """Forget all, as addresses have changed."""
        self._bound.clear()
        self._graph_ids.clear()


def _run_options(graph_id: int) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options


class OrtBackend(Backend):
    def __init__(
        self,
        bundle: Path,
        manifest: Manifest,
        device: str = "cpu",
        *,
        threads: int = 0,
        max_batch_size: int | None = 1,
        capacity: int | None = None,
        memory: Memory | None = None,
        trunks: Trunks | None = None,
    ) -> None:
        """device: cpu, cuda, cuda:1 and so on, or auto."""
        self._device = choose_device(device)
        kind, _ = split_device(self._device)
        check_onnx_runtime(bundle, manifest)
        slots = doublings(max_batch_size or DEFAULT_BATCH)
        capacities_of = stepped_capacities if kind == "cpu" else doubling_capacities
        capacities = capacities_of(capacity or manifest.model.max_capacity)
        wide = {} if kind == "cpu" else wide_chunks(manifest.model, capacities)
        kernels = cpu_kernels(manifest, self._device)
        capabilities = Capabilities(
            kind,
            manifest.model.vocab_size,
            capacities,
            (*wide, *PREFILL_WIDTHS),
            slots,
            scored_widths=tuple(width for width in PREFILL_WIDTHS if width <= MAX_SCORED_ROWS),
            chunk_capacities=wide,
            same_entries=isinstance(kernels, Kernels),
            kernels=kernels.name if isinstance(kernels, Kernels) else "onnxruntime",
            verifying=manifest.verifying,
        )
        files = OpenFiles.of_graphs(bundle, manifest)
        memory = memory or open_memory(self._device)
        super().__init__(bundle, manifest, capabilities, memory, files)
        self._finalizer = weakref.finalize(self, self.memory.close)
        self._trunks = self._open_trunks(threads) if trunks is None else trunks
        self._tails: dict[str, ort.InferenceSession] = {}  # by file
        # valid until the KV cache is resized
        self._bound_trunks = BoundSessions[tuple[str, int]]()  # by window and batch size
        self._bound_prefills = BoundSessions[tuple[int, int, bool]]()  # by width, slot and scored
        self._bound_tails = BoundSessions[tuple[Hashable, ...]]()

    def _open_trunks(self, threads: int) -> Trunks:
        slots = self.capabilities.slots
        trunks = open_trunk(self.files, self.manifest, self._device, slots, threads)
        self._note_capture(trunks.plain)
        return trunks

    def close(self) -> None:
        self._bound_trunks.clear()
        self._bound_prefills.clear()
        self._bound_tails.clear()
        self._finalizer()

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        super().resize(capacity, lengths)
        self._bound_trunks.clear()
        self._bound_prefills.clear()

    def run_trunk(self, window: Window, batch: int) -> None:
        make = partial(self._bind_trunk, window, batch)
        self._bound_trunks.get((window.name, batch), make).run()

    def run_tail(self, batch: Batch) -> None:
        for graph, touched, processed in self.graphs_after_trunk(batch):
            key = (batch.window.name, graph.file, batch.size, touched, processed)
            options = {"touched": touched, "processed": processed}
            make = partial(self._bind_graph, graph, batch.window, batch.size, **options)
            self._bound_tails.get(key, make).run()

    def _run_pass(self, batch: Batch) -> Mapping[str, npt.NDArray[np.int64]]:
        self.run_trunk(batch.window, batch.size)
        self.run_tail(batch)
        return {
            name: self.buffers.read(name, shape, np.int64)
            for name, shape in self.result_shapes(batch).items()
        }

    def _run_prefill(self, slot: int, window: Window, *, scored: bool) -> None:
        make = partial(self._bind_trunk, window, 1, slot=slot, prefill=True, scored=scored)
        self._bound_prefills.get((window.width, slot, scored), make).run()
        if scored:
            make = partial(self._bind_graph, self.manifest.logprobs, window, 1, scope=PREFILL)
            self._bound_tails.get((window.name, PREFILL), make).run()

    def _bind_trunk(
        self,
        window: Window,
        batch: int,
        graph_id: int,
        *,
        slot: int = 0,
        prefill: bool = False,
        scored: bool = False,
    ) -> BoundSession:
        bindings = self.bindings.trunk(window, batch, prefill=prefill, scored=scored)
        cache = self.cache
        past = [
            BoundTensor(name, cache.dtype, cache.shape(batch), address)
            for name, address in cache.addresses(slot)
        ]
        present = [replace(each, name=each.name.replace(PAST, PRESENT, 1)) for each in past]
        trunk = self._trunks.of(window)
        if trunk.file not in self.captures:
            self._note_capture(trunk)
        return self._bind(graph_id, trunk, bindings, past, present)

    def _bind_graph(
        self, graph: Graph, window: Window, batch: int, graph_id: int, **options: Any
    ) -> BoundSession:
        """options: of `BundleBindings.after_trunk`."""
        if graph.file not in self._tails:
            path = self.bundle / graph.file
            session = open_session(path, self._device, threads=1, files=self.files)
            self._note_capture(session)
            self._tails[graph.file] = session
        bindings = self.bindings.after_trunk(graph, window, batch, **options)
        return self._bind(graph_id, self._tails[graph.file], bindings)

    def _bind(
        self,
        graph_id: int,
        session: ort.InferenceSession,
        bindings: Bindings,
        past: Sequence[BoundTensor] = (),
        present: Sequence[BoundTensor] = (),
    ) -> BoundSession:
        inputs, outputs = (
            [BoundTensor(b.tensor, b.dtype, b.shape, self.buffers.address_of(b)) for b in bound]
            for bound in (bindings.inputs, bindings.outputs)
        )
        on_failure = partial(self._not_captured, session.file)
        memory, cache = self.memory, (past, present)
        return BoundSession(
            session, self._device, inputs, outputs, cache, graph_id, memory, on_failure
        )

    def _not_captured(self, file: str, reason: str) -> None:
        if file not in self.uncaptured:  # Warn once, not for every window, batch and slot.
            log.warning("%s runs without a CUDA graph, which makes passes slower: %s", file, reason)
        self.captures[file] = reason

    def _note_capture(self, session: ort.InferenceSession) -> None:
        if session.captures or session.not_captured is not None:
            self.captures[session.file] = session.not_captured


def stepped_capacities(maximum: int) -> tuple[int, ...]:
    """For the CPU: 64, 128, ... below `maximum`, and `maximum`."""
    sizes, size = [], CAPACITY_STEP
    while size < maximum:
        sizes.append(size)
        size += max(CAPACITY_STEP, size // 8 // CAPACITY_STEP * CAPACITY_STEP)
    return (*sizes, maximum)


def doubling_capacities(maximum: int) -> tuple[int, ...]:
    """For CUDA: 256, 512, ... below `maximum`, and `maximum`."""
    return doublings(maximum, FIRST_CAPACITY)
