"""The thread that decodes. It lives while there is something to do; whoever waits, waits for its events.

One thread owns runner and backend, so that an interrupt (Ctrl-C reaches the main thread) never stops a pass half-way.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pass_runtime.decode.scheduler import Scheduler
from pass_runtime.decode.sequence import End, Sequence
from pass_runtime.errors import PassError

T = TypeVar("T")


class Worker:
    """Runs a scheduler's rounds. `submit`, `call` and `close` may be called from any thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._tasks: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.closed = False
        self._release: Callable[[], None] | None = None
        _live.add(self)

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence into the queue. Raises QueueFull, or PassError where the session is closed."""
        with self._lock:
            self._check_open()
            self._scheduler.add(sequence)
            self._start()

    def call(self, task: Callable[[], T]) -> T:
        """Run `task` between two rounds, on the thread that owns the backend; returns what it returns."""
        future: Future[T] = Future()
        with self._lock:
            self._check_open()
            self._tasks.append((task, future))
            self._start()
        return future.result()

    def close(self, release: Callable[[], None] | None = None) -> None:
        """Cancel what is under way, wait for the pass in progress, then `release` what it worked on. Harmless when
        repeated."""
        with self._lock:
            self.closed, thread = True, self._thread
            if thread is threading.current_thread():  # garbage collection is done by any thread: it is in a pass now
                self._release = release
                return
        if thread is not None:
            thread.join()
        if release is not None:
            release()

    def _check_open(self) -> None:
        if self.closed:
            raise _closed()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pass-decode", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while self._more():
                while self._tasks:
                    self._run_task(*self._tasks.popleft())
                if not self._scheduler.idle:
                    self._scheduler.round()
        except BaseException as error:  # a bug: whoever waits must not wait for ever
            with self._lock:
                self._thread, self.closed = None, True
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._end_all(End("error", error=failure), failure)
            raise
        finally:
            if self._release is not None:
                self._release()

    def _more(self) -> bool:
        """Whether there is anything to do; if not, the thread ends, and the next request starts another one."""
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


_live: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A pass that is cut off by the end of the process can crash it."""
    for worker in list(_live):
        worker.close()
