"""Runs functions in child processes, with limits of time, memory and stack.

Chat templates are programs that come with a model, and constraints are programs that come with a
request. Both may run for ever, take all memory, or recurse until the stack is used up, which no
exception handler survives. So the functions that run them are called in child processes: if one
exceeds a limit, its child ends, and the caller gets `ChildStopped`.

Parent and child exchange messages in JSON, each after its length in 8 bytes. A child serves one
call at a time, and ends with its parent. With `forks`, a fork of the child serves each call, so
that a limit ends only the fork, and the next call needs no new set-up.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from pass_runtime.errors import FORKED, OfOneProcess, PassError

HEADER = struct.Struct(">Q")
"""What comes before a message: its length in bytes."""
WALL_SECONDS_PER_CPU_SECOND = 20
"""The limit of a call in wall-clock time is this many times its limit in CPU time."""
START_SECONDS = 60
"""The limit of the start and set-up of a child, in wall-clock time."""
PYTHON_VARIABLE = "PASS_PYTHON"
"""The environment variable that names the interpreter of child processes."""
ONE_THREAD_VARIABLES = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
"""Environment variables with which libraries in a child use one thread each."""
CHILD_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from pass_runtime.text.child import "
    "serve; serve({target!r})"
)


@dataclass(frozen=True)
class Limits:
    """Limits of one call. memory_bytes: for the call, beside what the set-up took."""

    cpu_seconds: float
    memory_bytes: int
    stack_bytes: int = 4 << 20


class ChildStopped(PassError):
    """The function exceeded a limit. The message is a clause: "it takes more than 2 seconds"."""


class ChildPool(OfOneProcess):
    """Child processes for one function, started when needed. Any thread may call the methods."""

    def __init__(
        self, target: str, setup: object, limits: Limits, size: int = 1, *, forks: bool = False
    ) -> None:
        """target: "module:name" of a function that a child calls once, with `setup`, and that
        returns the function for the calls, which takes one value. Values and results are JSON
        values. size: the most processes; further callers wait. forks: whether every call runs in a
        fork of the child; `target` must then start no threads."""
        self._target, self._setup, self._limits, self._forks = target, setup, limits, forks
        self._free: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(size):
            self._free.put(None)
        self._children = weakref.WeakSet[_Child]()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end_all, self._children, self._owner)

    def call(self, value: object) -> Any:
        """Return the function's result for `value`. Raises ChildStopped if the function exceeds a
        limit or its child ends; PassError if the function raises one, if no child can be started,
        or in a fork of the pool's process; RuntimeError for other errors of the function."""
        if os.getpid() != self._owner:
            raise PassError(FORKED)
        child = self._free.get()
        try:
            if child is None or not child.alive:
                child = _Child(self._target, self._setup, self._limits, forks=self._forks)
                self._children.add(child)
            return child.call(value)
        finally:
            self._free.put(child if child is not None and child.alive else None)

    def close(self) -> None:
        """End all children, and with them the running calls."""
        self._finalizer()


def _end_all(children: weakref.WeakSet[_Child], owner: int) -> None:
    for child in list(children) if os.getpid() == owner else ():
        child.kill()


class _Child:
    """A child process, as its parent sees it."""

    def __init__(self, target: str, setup: object, limits: Limits, *, forks: bool) -> None:
        self._limits = limits
        # An editable install may find this package in another way than by sys.path.
        package = str(Path(__file__).parents[2])
        program = CHILD_PROGRAM.format(path=[*sys.path, package], target=target)
        self._process = subprocess.Popen(
            [interpreter(), "-I", "-S", "-c", program],  # with the parent's sys.path alone
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD_VARIABLES,
            start_new_session=True,  # so that Ctrl-C reaches the parent alone
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        try:
            settings = [limits.cpu_seconds, limits.memory_bytes, limits.stack_bytes, forks]
            _unwrapped(self._exchange([setup, *settings], START_SECONDS))
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, value: object) -> Any:
        try:
            answer = self._exchange([value], self._limits.cpu_seconds * WALL_SECONDS_PER_CPU_SECOND)
        except BaseException:  # After an interrupt, too, the child cannot serve another call.
            self.kill()
            raise
        if "signal" in answer:
            raise ChildStopped(self._why_ended(answer["signal"]))
        return _unwrapped(answer)

    def kill(self) -> None:
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)  # the child and its fork
        self._process.wait()

    def __del__(self) -> None:
        """Close the pipes, which `kill` cannot: another thread may be reading from them."""
        with suppress(AttributeError):  # There are no pipes if the process did not start.
            for pipe in (self._to, self._from):
                with suppress(OSError):
                    pipe.close()

    def _exchange(self, message: object, seconds: float) -> Any:
        """Send a message and return the answer. Raises ChildStopped if the child ends or takes more
        than `seconds`."""
        try:
            _write(self._to, message)
            return self._read(time.monotonic() + seconds)
        except (BrokenPipeError, EOFError):
            raise ChildStopped(self._why_ended(-self._process.wait())) from None

    def _read(self, deadline: float) -> Any:
        """Return the next message. Raises EOFError if the child ends before it is complete."""
        read, size = bytearray(), HEADER.size
        with selectors.DefaultSelector() as selector:
            selector.register(self._from, selectors.EVENT_READ)
            while len(read) < size:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise ChildStopped("it does not end in time")
                if not (part := os.read(self._from.fileno(), 1 << 20)):
                    raise EOFError
                read += part
                if len(read) >= HEADER.size:
                    size = HEADER.size + HEADER.unpack_from(read)[0]
        return json.loads(read[HEADER.size :])

    def _why_ended(self, signal_number: int) -> str:
        """Return the message of ChildStopped. signal_number: the signal that ended the process, or
        minus its exit status. All but SIGPROF and SIGSEGV are taken for a lack of memory."""
        if signal_number == signal.SIGPROF:
            return f"it takes more than {self._limits.cpu_seconds:g} seconds"
        if signal_number == signal.SIGSEGV:
            return "it is nested too deeply"
        return f"it needs more than {self._limits.memory_bytes >> 20} MiB of memory"


def _unwrapped(answer: Any) -> Any:
    """Return the result in a child's answer, or raise the error in it."""
    if "error" in answer:
        raise PassError(answer["error"])
    if "bug" in answer:
        raise RuntimeError(f"in a child process:\n{answer['bug']}")
    return answer["result"]


@lru_cache(maxsize=1)
def interpreter() -> str:
    """Return the path of a Python interpreter of this process's version. (`sys.executable` is not
    one if Python is embedded, as in Triton's stub.) Raises PassError if none is found."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    directory = Path(sys.base_exec_prefix, "bin")
    name = f"python{version}"
    names = (os.environ.get(PYTHON_VARIABLE), sys.executable, directory / name, name, "python3")
    for each in names:
        if not each or not (path := shutil.which(each)) or not Path(path).name.startswith("python"):
            continue
        run = subprocess.run([path, "-I", "-S", "-V"], capture_output=True, text=True, check=False)
        if run.stdout.startswith(f"Python {version}."):
            return path
    raise PassError(
        f"no interpreter of Python {version} is found for child processes; set "
        f"{PYTHON_VARIABLE} to one"
    )


def serve(target: str) -> None:
    """Serve calls of `target` until standard input is closed: the main function of a child."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that what a library prints does not come between messages
    setup, seconds, memory, stack, forks = _next_message(source)
    try:
        module, _, name = target.partition(":")
        function: Callable[[Any], Any] = getattr(import_module(module), name)(setup)
    except PassError as error:
        _write(sink, {"error": str(error)})
        return
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_STACK, stack)
    _set_limit(resource.RLIMIT_AS, _address_space() + memory)
    _write(sink, {"result": None})
    while message := _next_message(source):
        if forks and (fork := os.fork()):
            if exit_code := os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]):
                _write(sink, {"signal": -exit_code})
            continue
        # SIGPROF ends the process after so many seconds of CPU time.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(function, message[0])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, answer)
        if forks:
            os._exit(0)


def _answer(function: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    """Return the answer to a call, which `_unwrapped` reads. A lack of memory ends the process."""
    try:
        return {"result": function(value)}
    except PassError as error:
        return {"error": str(error)}
    except MemoryError:
        os.abort()
    except Exception:
        return {"bug": traceback.format_exc()}


def _write(sink: IO[bytes], message: object) -> None:
    data = json.dumps(message).encode()
    sink.write(HEADER.pack(len(data)) + data)
    sink.flush()


def _next_message(source: IO[bytes]) -> list[Any]:
    """Return the next message; [] at the end of the input."""
    header = source.read(HEADER.size)
    message: list[Any] = json.loads(source.read(HEADER.unpack(header)[0])) if header else []
    return message


def _set_limit(kind: int, value: int) -> None:
    """Lower a limit of this process to `value`, but not above the system's hard limit."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int:
    """Return the size of this process's virtual memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
