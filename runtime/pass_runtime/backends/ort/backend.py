"""The backend for ONNX Runtime: its sessions are bound to buffers that stay on the device.

"Session" here is ONNX Runtime's word for an opened graph. A pass is a `run_with_iobinding` call for
each graph, and a copy of a few integers to the host. One session of a graph serves every width and
batch size; what it is bound to is kept for each plan and batch size.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.base import (
    DEFAULT_BATCH,
    MAX_SCORED_ROWS,
    Backend,
    Capabilities,
    PassKind,
    check_onnx_runtime,
    doublings,
)
from pass_runtime.backends.devices import split_device
from pass_runtime.backends.memory import Memory, wide_chunks
from pass_runtime.backends.ort.engine import (
    check_graph,
    choose_device,
    open_memory,
    open_session,
)
from pass_runtime.backends.ort.kernels import Kernels
from pass_runtime.backends.ort.trunks import (
    BoundSession,
    BoundSessions,
    BoundTensor,
    Trunks,
    bind,
    cpu_kernels,
    log,
    open_trunk,
)
from pass_runtime.bundle.bindings import PREFILL, Bindings
from pass_runtime.bundle.manifest import Graph, Manifest
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.tensors import PAST, PRESENT
from pass_runtime.errors import PassError

T = TypeVar("T")
Tasks = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class OneThread:
    """Runs tasks one after another in its own thread, because captured graphs belong to the thread
    that captured them. The thread ends with this object. context: returns the context manager in
    which the thread runs all tasks."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._tasks: Tasks = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=(self._tasks, context), name="pass-device", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._tasks.put, None)

    def run(self, task: Callable[[], T]) -> T:
        """Run `task` in the thread; return its result or raise its error. Tasks may call this."""
        if threading.current_thread() is self._thread:
            return task()
        future: Future[T] = Future()
        self._tasks.put((task, future))
        return future.result()

    def close(self) -> None:
        """End the thread after the tasks in its queue. Repeated calls do nothing."""
        self._finalizer()
        self._thread.join()


def _work(tasks: Tasks, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run queued tasks until None is queued. This refers to no `OneThread`, or none were freed."""
    with context():
        while (queued := tasks.get()) is not None:
            task, future = queued
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del queued, task, future  # Free what the task refers to before waiting for the next.


FIRST_CAPACITY = 256
"""The first KV capacity on CUDA, in tokens."""
CAPACITY_STEP = 64
"""KV capacities on the CPU, in tokens, are multiples of this, except the largest one: in the
portable trunk, other numbers of masked entries change how sums over all entries are rounded."""
ROUNDED_WEIGHTS = ("int4", "int8")
"""The weight formats with which the CPU's kernels round activations to 8 bits."""
PREFILL_WIDTHS = (256, 64, 16, 1)
"""The widths of prompt chunks; GPUs also have those of `wide_chunks`."""
CAPTURE_DEVICES: Collection[str] = ("cuda",)
"""The devices on which ONNX Runtime captures CUDA graphs, for each thread separately."""


class OrtBackend(Backend):
    """The bundle's own trunk and tails on the CPU or on CUDA."""

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
        exact: bool = False,
        trunks: Trunks | None = None,
    ) -> None:
        """device: cpu, cuda, cuda:1 and so on, or auto. threads: CPU threads; 0 lets ONNX Runtime
        choose. max_batch_size: None is DEFAULT_BATCH. capacity: the largest KV capacity in tokens;
        None is the model's.

        exact: as for `open_trunk`. trunks: sessions of the trunk that are open already, to use in
        place of new ones.
        """
        self._device = choose_device(device)
        kind, _ = split_device(self._device)
        check_onnx_runtime(bundle, manifest)
        slots = doublings(max_batch_size or DEFAULT_BATCH)
        capacities = CAPACITIES[kind](capacity or manifest.model.max_capacity)
        wide = {} if kind == "cpu" else wide_chunks(manifest.model, capacities)
        kernels = None if exact else cpu_kernels(manifest, self._device)
        capabilities = Capabilities(
            kind,
            manifest.model.vocab_size,
            capacities,
            (*wide, *PREFILL_WIDTHS),
            slots,
            scored_widths=tuple(width for width in PREFILL_WIDTHS if width <= MAX_SCORED_ROWS),
            chunk_capacities=wide,
            trees=manifest.tree_sizes(),
            rounds_activations=kind == "cpu"
            and not exact
            and manifest.model.weights in ROUNDED_WEIGHTS,
            same_entries=isinstance(kernels, Kernels),
            kernels=kernels.name if isinstance(kernels, Kernels) else "onnxruntime",
        )
        files = OpenFiles.of_graphs(bundle, manifest)
        memory = memory or open_memory(self._device)
        super().__init__(bundle, manifest, capabilities, memory, files)
        self._finalizer = weakref.finalize(self, self.memory.close)
        self._thread = OneThread(self.memory.for_this_thread) if kind in CAPTURE_DEVICES else None
        self._trunks = self._open_trunks(threads, exact) if trunks is None else trunks
        self._tails: dict[str, ort.InferenceSession] = {}  # by file
        # Bindings to the KV cache, valid until it is resized.
        self._bound_trunks = BoundSessions[tuple[str, int]]()  # by plan and batch size
        self._bound_prefills = BoundSessions[tuple[int, int, bool]]()  # by width, slot and scored
        # By `PassKind.tail_key` and `logprobs_key`, and likewise for the processors.
        self._bound_tails = BoundSessions[tuple[Hashable, ...]]()

    def _open_trunks(self, threads: int, exact: bool) -> Trunks:
        slots = self.capabilities.slots
        trunks = open_trunk(self.files, self.manifest, self._device, slots, threads, exact=exact)
        self._note_capture(trunks.plain.file, trunks.plain)
        return trunks

    def close(self) -> None:
        self._bound_trunks.clear()
        self._bound_prefills.clear()
        self._bound_tails.clear()
        if self._thread is not None:
            self._thread.close()
        self._finalizer()

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        super().resize(capacity, lengths)
        self._bound_trunks.clear()
        self._bound_prefills.clear()

    def run_trunk(self, plan: Plan, batch: int) -> None:
        make = partial(self._bind_trunk, plan, batch)
        self._in_thread(lambda: self._run(self._bound_trunks.get((plan.name, batch), make)))

    def run_tail(self, kind: PassKind) -> None:
        self._in_thread(lambda: self._run_tails(kind))

    def _in_thread(self, task: Callable[[], T]) -> T:
        """Run `task`, in the thread that captures graphs if there is one."""
        return task() if self._thread is None else self._thread.run(task)

    def _run_tails(self, kind: PassKind) -> None:
        if kind.touched:
            key = (kind.plan.name, "processors", kind.batch, kind.touched)
            self._run(self._bound_tails.get(key, partial(self._bind_processors, kind)))
        self._run(self._bound_tails.get(kind.tail_key, partial(self._bind_tail, kind)))
        if kind.logprobs:
            self._run(self._bound_tails.get(kind.logprobs_key, partial(self._bind_logprobs, kind)))

    def _run_pass(self, kind: PassKind) -> Mapping[str, npt.NDArray[np.int64]]:
        return self._in_thread(lambda: self._run_graphs(kind))

    def _run_graphs(self, kind: PassKind) -> Mapping[str, npt.NDArray[np.int64]]:
        self.run_trunk(kind.plan, kind.batch)
        self.run_tail(kind)
        return {
            name: self.buffers.read(name, shape, np.int64)
            for name, shape in self.result_shapes(kind).items()
        }

    def _run_prefill(self, slot: int, plan: Plan, *, scored: bool) -> None:
        self._in_thread(lambda: self._run_prefill_graphs(slot, plan, scored))

    def _run_prefill_graphs(self, slot: int, plan: Plan, scored: bool) -> None:
        make = partial(self._bind_trunk, plan, 1, slot=slot, prefill=True, scored=scored)
        self._run(self._bound_prefills.get((plan.width, slot, scored), make))
        if scored:
            bindings = self.bindings.logprobs(plan, 1, scope=PREFILL)
            bind = partial(self._bind_graph, tail=self.manifest.logprobs, bindings=bindings)
            self._run(self._bound_tails.get((plan.name, "logprobs"), bind))

    def _run(self, bound: BoundSession) -> None:
        """Run a session. If it fails, raise DeviceLost if that is the reason."""
        try:
            bound.run()
        except PassError:
            self.memory.check_device()
            raise

    def _bind_trunk(
        self,
        plan: Plan,
        batch: int,
        graph_id: int,
        *,
        slot: int = 0,
        prefill: bool = False,
        scored: bool = False,
    ) -> BoundSession:
        bindings = self.bindings.trunk(plan, batch, prefill=prefill, scored=scored)
        past, present = self._cache_tensors(slot, batch)
        trunk = self._trunks.of(plan)
        if trunk.file not in self.captures:
            self._note_capture(trunk.file, trunk)
        return self._bind(graph_id, trunk.file, trunk, bindings, past, present)

    def _cache_tensors(self, slot: int, batch: int) -> tuple[list[BoundTensor], list[BoundTensor]]:
        """Return the cache's inputs for `batch` slots from `slot` on, and its outputs, which have
        the same addresses, so that no pass copies the cache."""
        cache = self.cache
        past = [
            BoundTensor(name, cache.dtype, cache.shape(batch), address)
            for name, address in cache.addresses(slot)
        ]
        return past, [replace(each, name=each.name.replace(PAST, PRESENT, 1)) for each in past]

    def _bind_tail(self, kind: PassKind, graph_id: int) -> BoundSession:
        bindings = self.bindings.tail(
            kind.plan, kind.sampler, kind.batch, processed=bool(kind.touched)
        )
        return self._bind_graph(
            graph_id, self.bindings.tail_graph(kind.plan, kind.sampler), bindings
        )

    def _bind_processors(self, kind: PassKind, graph_id: int) -> BoundSession:
        processors = self.processors
        bindings = self.bindings.processors(processors, kind.plan, kind.batch, kind.touched)
        return self._bind_graph(graph_id, processors, bindings)

    def _bind_logprobs(self, kind: PassKind, graph_id: int) -> BoundSession:
        bindings = self.bindings.logprobs(kind.plan, kind.batch, processed=kind.logprobs_key[-1])
        return self._bind_graph(graph_id, self.manifest.logprobs, bindings)

    def _bind_graph(self, graph_id: int, tail: Graph, bindings: Bindings) -> BoundSession:
        return self._bind(graph_id, tail.file, self._tail_session(tail), bindings)

    def _bind(
        self,
        graph_id: int,
        file: str,
        session: ort.InferenceSession,
        bindings: Bindings,
        past: Sequence[BoundTensor] = (),
        present: Sequence[BoundTensor] = (),
    ) -> BoundSession:
        inputs, outputs = (
            [BoundTensor(b.tensor, b.dtype, b.shape, self.buffers.address_of(b)) for b in bound]
            for bound in (bindings.inputs, bindings.outputs)
        )
        return bind(
            session,
            self._device,
            inputs,
            outputs,
            (past, present),
            graph_id,
            self.memory,
            partial(self._not_captured, file),
        )

    def _not_captured(self, file: str, reason: str) -> None:
        """Note and log why a run of the graph `file` could not be captured."""
        if file not in self.uncaptured:  # Warn once, not for every plan, batch and slot.
            log.warning("%s runs without a CUDA graph, which makes passes slower: %s", file, reason)
        self.captures[file] = reason

    def _tail_session(self, graph: Graph) -> ort.InferenceSession:
        """Return the session of a tail, opened with one thread: further threads would wait spinning
        on the cores that the trunk's next pass needs, which doubled the time of a pass."""
        if graph.file not in self._tails:
            path = self.bundle / graph.file
            session = open_session(path, self._device, threads=1, files=self.files)
            check_graph(session, graph)
            self._note_capture(graph.file, session)
            self._tails[graph.file] = session
        return self._tails[graph.file]

    def _note_capture(self, file: str, session: ort.InferenceSession) -> None:
        """Note whether ONNX Runtime captures the graph `file`; nothing on the CPU."""
        if session.captures or session.not_captured is not None:
            self.captures[file] = session.not_captured


def stepped_capacities(maximum: int) -> tuple[int, ...]:
    """Return the KV capacities on the CPU: 64, 128, ... below `maximum`, and `maximum`. A step is
    64, or the largest multiple of 64 up to an eighth of the capacity before it.

    The steps are small: attention of the portable trunk takes time for every entry of the cache,
    valid or not, and copying the cache whenever it grows costs less.
    """
    sizes, size = [], CAPACITY_STEP
    while size < maximum:
        sizes.append(size)
        size += max(CAPACITY_STEP, size // 8 // CAPACITY_STEP * CAPACITY_STEP)
    return (*sizes, maximum)


def doubling_capacities(maximum: int) -> tuple[int, ...]:
    """Return the KV capacities on CUDA: 256, 512, ... below `maximum`, and `maximum`. They are few,
    because each needs CUDA graphs of its own."""
    return doublings(maximum, FIRST_CAPACITY)


CAPACITIES: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "cpu": stepped_capacities,
    "cuda": doubling_capacities,
}
"""Device -> the KV capacities up to a largest one."""
