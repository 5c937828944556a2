"""The thread that decodes, for as long as its session lives.

One thread owns engine and backend: Ctrl-C reaches the main thread only and never stops a pass
half-way, and captured CUDA graphs stay in their thread.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from pass_runtime.decode.engine import Engine
from pass_runtime.decode.sequence import End, SequenceState
from pass_runtime.errors import FORKED, OfOneProcess, PassError

T = TypeVar("T")


class Places(OfOneProcess):
    """Reserved places (slots or queue). They return when its `with` block ends or it is garbage;
    `submit` takes them over."""

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
    """Runs an engine's steps in a thread. Any thread may call the public methods."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._backend = engine, engine.backend
        # reentrant: the garbage collector may give back `Places` in a thread that holds it
        self._lock = threading.RLock()
        self._has_work = threading.Condition(self._lock)
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.closed = False
        self._free_backend: Callable[[], None] | None = None
        self._failure: PassError | None = None
        self._process = os.getpid()
        _live_workers.add(self)
        self._thread = threading.Thread(target=self._run, name="pass-decode", daemon=True)
        self._thread.start()

    def submit(self, sequences: Sequence[SequenceState], places: Places | None = None) -> None:
        """Queue all of `sequences`, or none. places: from `reserve`. Raises QueueFull, or
        PassError if the session is closed."""
        with self._while_open():
            reserved = 0 if places is None else min(places.count, len(sequences))
            if reserved < len(sequences):
                self._engine.reserve(len(sequences) - reserved)
            if places is not None:
                places.count -= reserved
            self._engine.add(*sequences)
            self._has_work.notify()

    def reserve(self, count: int, max_queue: int | None = None) -> Places:
        """Raises as `submit` does."""
        with self._while_open():
            self._engine.reserve(count, max_queue)
        return Places(count, self._release)

    def _release(self, count: int) -> None:
        if os.getpid() == self._process:  # In a fork, another thread may hold the lock for ever.
            with self._lock:
                self._engine.release(count)

    def call(self, task: Callable[[], T]) -> T:
        """Run `task` in the thread that decodes, between two steps; return its result."""
        if self._thread is threading.current_thread():
            return task()
        future: Future[T] = Future()
        with self._while_open():
            self._tasks.append((task, future))
            self._has_work.notify()
        return future.result()

    def close(self, release: Callable[[], None] | None = None) -> None:
        """Cancel every sequence, wait for the pass in progress, then call `release`, which frees
        the backend."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self.closed = True
            self._has_work.notify()
            # The garbage collector closed the session during a pass, which needs the backend.
            if self._thread is threading.current_thread():
                self._free_backend = release
                return
        self._thread.join()
        if release is not None:
            release()

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        """Raises PassError if the session is closed."""
        if os.getpid() != self._process:
            raise PassError(FORKED)
        with self._lock:
            if self.closed:
                raise _closed() if self._failure is None else PassError(str(self._failure))
            if (failure := self._backend.failure) is not None:
                raise PassError(str(failure))
            yield

    def _run(self) -> None:
        try:
            with self._backend.for_this_thread():
                while self._wait():
                    self._work()
        except BaseException as error:  # A bug: readers must get it, or they would wait for ever.
            self._close_with(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise
        finally:
            if self._free_backend is not None:
                self._free_backend()

    def _wait(self) -> bool:
        if not self.closed and (self._tasks or not self._engine.idle):
            return True
        with self._lock:
            while not (self.closed or self._tasks or not self._engine.idle):
                self._has_work.wait()
        if self.closed:
            self._end_all(End("cancelled"), _closed())
        return not self.closed

    def _work(self) -> None:
        while self._tasks:
            task, future = self._tasks.popleft()
            try:
                future.set_result(task())
            except Exception as error:
                future.set_exception(error)
            del task, future  # Free what the task refers to before waiting for the next.
        if self._backend.failure is None and not self._engine.idle:
            self._engine.step()
        if (failure := self._backend.failure) is not None:
            self._close_with(failure)

    def _close_with(self, failure: Exception) -> None:
        with self._lock:
            self.closed = True
            self._failure = failure if isinstance(failure, PassError) else None
        self._end_all(End("error", error=failure), failure)

    def _end_all(self, end: End, failure: Exception) -> None:
        self._engine.end_all(end)
        while self._tasks:
            self._tasks.popleft()[1].set_exception(failure)


def _closed() -> PassError:
    return PassError("this session is closed; load the bundle again")


_live_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A pass that still ran at the end of the process could crash it."""
    for worker in list(_live_workers):
        worker.close()


def _forget_all() -> None:
    """Keep a forked child from freeing engines: it lacks their threads, so destructors would
    wait for ever, or abort. With the C library's on_exit, none runs at its end either."""
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
