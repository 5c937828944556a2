"""One thread that runs all work of a device whose captured graphs belong to the thread that captured them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Tasks = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class OneThread:
    """Runs tasks one after another in a thread of its own, which ends with this object. `context`: makes a context that
    the thread holds."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._tasks: Tasks = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks, context), name="pass-device", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._tasks.put, None)

    def run(self, task: Callable[[], T]) -> T:
        """What `task` returns or raises. A task may call this itself."""
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
    with context():
        while (given := tasks.get()) is not None:
            task, future = given
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del given, task, future  # or what they hold would live until the next one comes
