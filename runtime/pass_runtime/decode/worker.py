"""The thread that decodes. It runs while there is work, and callers wait for the events of their
sequences.

One thread owns runner and backend, so that an interrupt never stops a pass half-way: Ctrl-C reaches
the main thread only.

On engines that repeat passes as CUDA graphs, `capture_graphs` captures the usual passes before
requests need them, because a first run and a capture take far longer than a repetition.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from pass_runtime.backends.base import Backend, PassKind
from pass_runtime.bundle.plan import MODES, Plan, make_cycle
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.decode.runner import Runner
from pass_runtime.decode.scheduler import Scheduler
from pass_runtime.decode.sequence import End, SequenceState
from pass_runtime.errors import FORKED, OfOneProcess, PassError

log = logging.getLogger("pass_runtime.backends")

RUNS_UNTIL_CAPTURED = 2
"""How often a pass runs until an engine has captured it."""


def capture_graphs(
    runner: Runner, capacity: int, batch: int, samplers: Collection[Sampler]
) -> None:
    """Capture passes for later requests: run the passes of all MODES over `batch` masked slots,
    with a KV capacity of `capacity` tokens, and prompt chunks in the slots that no smaller batch
    size has, as a call for that size captures the others. Do nothing while a sequence runs. Windows
    that do not fit after the tokens that free slots keep are left out."""
    capabilities, capacity_before = runner.backend.capabilities, runner.backend.capacity
    kept = max(slot.cached for slot in runner.slots)
    if runner.busy or kept >= capacity:
        return
    try:
        runner.resize(capacity)
        for plan in plans_to_capture(runner):
            if kept + capabilities.padded_width(plan.width) <= capacity:
                for sampler in samplers:
                    runner.run_masked(PassKind(plan, batch, sampler), RUNS_UNTIL_CAPTURED)
        first = max((size for size in capabilities.batch_sizes if size < batch), default=0)
        for slot in runner.slots[first:batch]:
            for width in capabilities.chunks(kept, capacity):
                if kept + capabilities.padded_width(width) <= capacity:
                    runner.run_prefill(slot, width, RUNS_UNTIL_CAPTURED)
    except PassError as error:
        # A request that needs such a pass will meet the error again, and report it.
        log.warning(
            "passes over %d slots were not all captured, and may be slow or fail: %s", batch, error
        )
    finally:
        if capacity_before and runner.backend.failure is None:
            runner.resize(capacity_before)


def plans_to_capture(runner: Runner) -> list[Plan]:
    """Return the plans of MODES that the backend can run."""
    lookahead = runner.backend.manifest.lookahead.length
    plans = {plan.name: plan for mode in MODES for plan in make_cycle(mode, lookahead).plans}
    return [plan for plan in plans.values() if runner.backend.capabilities.allows([plan])]


T = TypeVar("T")


class Places(OfOneProcess):
    """Places (slots, or places in the queue) reserved for `count` sequences. They are given back
    when a `with` block of this object ends or the object is garbage; `submit` takes them over."""

    def __init__(self, count: int, release: Callable[[int], None]) -> None:
        self.count, self._release = count, release

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        count, self.count = self.count, 0
        if count:
            self._release(count)

    def __del__(self) -> None:
        self.__exit__()


class Worker:
    """Runs the steps of a scheduler in a thread. Any thread may call the public methods."""

    def __init__(self, scheduler: Scheduler, backend: Backend) -> None:
        self._scheduler, self._backend = scheduler, backend
        # reentrant, as the garbage collector may give back `Places` in a thread that holds it
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.closed = False
        self._free_backend: Callable[[], None] | None = None
        self._failure: PassError | None = None
        self._process = os.getpid()
        _live_workers.add(self)

    def submit(self, sequences: Sequence[SequenceState], places: Places | None = None) -> None:
        """Queue all of `sequences`, or none. places: the result of `reserve` for them. Raises
        QueueFull if more places are needed than are free, or PassError if the session is closed."""
        with self._while_open():
            reserved = 0 if places is None else min(places.count, len(sequences))
            if reserved < len(sequences):
                self._scheduler.reserve(len(sequences) - reserved)
            if places is not None:
                places.count -= reserved
            self._scheduler.add(*sequences)
            try:
                self._start()
            except BaseException:  # an interrupt: the caller gets no stream to read
                for sequence in sequences:
                    sequence.cancelled = True
                raise

    def reserve(self, count: int, max_queue: int | None = None) -> Places:
        """Reserve places for `count` sequences. Raises as `submit` does."""
        with self._while_open():
            self._scheduler.reserve(count, max_queue)
        return Places(count, self._release)

    def _release(self, count: int) -> None:
        if os.getpid() == self._process:  # In a fork, another thread may hold the lock for ever.
            with self._lock:
                self._scheduler.release(count)

    def call(self, task: Callable[[], T]) -> T:
        """Run `task` in the thread that decodes, between two steps; return its result."""
        future: Future[T] = Future()
        with self._while_open():
            self._tasks.append((task, future))
            self._start()
        return future.result()

    def close(self, release: Callable[[], None] | None = None) -> None:
        """Cancel every sequence, wait for the pass in progress, then call `release`, which frees
        the backend. Repeated calls are allowed. In a forked process, do nothing."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self.closed, thread = True, self._thread
            # The garbage collector closed the session during a pass, which needs the backend.
            if thread is threading.current_thread():
                self._free_backend = release
                return
        if thread is not None:
            thread.join()
        if release is not None:
            release()

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Hold the lock during a block. Raises PassError if the session is closed."""
        if os.getpid() != self._process:
            raise PassError(FORKED)
        with self._lock:
            if self.closed:
                raise _closed() if self._failure is None else PassError(str(self._failure))
            if (failure := self._backend.failure) is not None:
                raise PassError(str(failure))
            yield

    def _start(self) -> None:
        """Start the thread if there is none. The caller holds the lock. If an interrupt (Ctrl-C)
        comes before `self._thread` is set, the new thread ends, and the next request starts
        another."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="pass-decode", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        with self._lock:  # wait until `_start` has ended
            if self._thread is not threading.current_thread():
                return
        try:
            with self._backend.for_this_thread():
                self._work()
        except BaseException as error:  # A bug: readers must get it, or they would wait for ever.
            self._close_with(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise
        finally:
            if self._free_backend is not None:
                self._free_backend()

    def _work(self) -> None:
        while self._has_work():
            while self._tasks:
                self._run_task(*self._tasks.popleft())
            if self._backend.failure is None and not self._scheduler.idle:
                self._scheduler.step()
            if (failure := self._backend.failure) is not None:
                self._close_with(failure)
                return

    def _close_with(self, failure: Exception) -> None:
        """Close the session, and end all sequences and tasks with this error."""
        with self._lock:
            self._thread, self.closed = None, True
            self._failure = failure if isinstance(failure, PassError) else None
        self._end_all(End("error", error=failure), failure)

    def _has_work(self) -> bool:
        """Whether there is work. If not, the thread ends, and the next request starts another."""
        if self.closed:
            self._end_all(End("cancelled"), _closed())
        with self._lock:
            if self._tasks or not self._scheduler.idle:
                return True
            self._thread = None
            return False

    def _end_all(self, end: End, failure: Exception) -> None:
        self._scheduler.end_all(end)
        while self._tasks:
            self._tasks.popleft()[1].set_exception(failure)

    def _run_task(self, task: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(task())
        except Exception as error:
            future.set_exception(error)


def _closed() -> PassError:
    return PassError("this session is closed; load the bundle again")


_live_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close every worker before the process ends: a pass that still runs then could crash it."""
    for worker in list(_live_workers):
        worker.close()


def _forget_all() -> None:
    """Keep a forked child from freeing engines. A child does not have the engines' threads, so
    destructors would wait for ever, or abort. With the C library's on_exit, none runs at the
    child's end either."""
    for worker in list(_live_workers):
        worker.closed = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))
    libc = ctypes.CDLL(None)
    # These two run after Python's own exit handlers, the last one first.
    if _live_workers and hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
