"""Runs functions in child processes, with limits of time, memory and stack.

Chat templates are programs that come with a model, and constraints are programs that come with a
request. Both may run for ever, take all memory, or recurse until the stack is used up, which no
exception handler survives. So a function that reads one runs in a child process: if it exceeds a
limit, the child ends and the caller gets `ChildStopped`.

Messages are JSON, each after its length in 8 bytes. A child serves one call at a time, and ends
with its parent. With `forks`, a fork of the child serves the call: if a limit ends the fork, the
next call needs no new set-up.
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

from pass_runtime.errors import FORKED, PassError

HEADER = struct.Struct(">Q")
WALL_SECONDS_PER_CPU_SECOND = 20
"""The wall-clock limit of a call is this many times its limit of CPU time."""
START_SECONDS = 60
"""The wall-clock limit of the start and set-up of a child."""
PYTHON_VARIABLE = "PASS_PYTHON"
"""The environment variable that names the interpreter of child processes."""
ONE_THREAD_VARIABLES = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
"""Environment variables that limit the libraries in a child to one thread each."""
CHILD_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from pass_runtime.text.child import "
    "serve; serve({target!r})"
)


@dataclass(frozen=True)
class Limits:
    """Limits of one call. memory_bytes: what the set-up takes is not counted."""

    cpu_seconds: float
    memory_bytes: int
    stack_bytes: int = 4 << 20


class ChildStopped(PassError):
    """The function exceeded a limit. The message is a clause, such as "it takes more than 2
    seconds"."""


class ChildPool:
    """Child processes that run the same function, started when they are needed. Any thread may call
    its methods."""

    def __init__(
        self, target: str, setup: object, limits: Limits, size: int = 1, *, forks: bool = False
    ) -> None:
        """target: "module:name" of a function that takes `setup` and returns the function to call,
        which takes one value. Values and results are JSON values. size: the most processes; further
        callers wait. forks: every call runs in a fork of the process; `target` must then start no
        threads."""
        self._target, self._setup, self._limits, self._forks = target, setup, limits, forks
        self._free: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(size):
            self._free.put(None)
        self._children = weakref.WeakSet[_Child]()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end_all, self._children, self._owner)

    def call(self, value: object) -> Any:
        """The function's result. Raises ChildStopped if a limit is exceeded or the child ends;
        PassError if it raises one, if no child can be started, or in a fork of the pool's process;
        RuntimeError for its other errors."""
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
    def __init__(self, target: str, setup: object, limits: Limits, *, forks: bool) -> None:
        self._limits = limits
        # may be missing in sys.path with an editable install
        package = str(Path(__file__).parents[2])
        program = CHILD_PROGRAM.format(path=[*sys.path, package], target=target)
        self._process = subprocess.Popen(
            [interpreter(), "-I", "-S", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD_VARIABLES,
            start_new_session=True,  # Ctrl-C is for the parent
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
        except BaseException:  # an interrupt, too: the child is not ready for another call
            self.kill()
            raise
        if "signal" in answer:
            raise ChildStopped(self._why_ended(answer["signal"]))
        return _unwrapped(answer)

    def kill(self) -> None:
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)  # its fork, too
        self._process.wait()

    def __del__(self) -> None:
        """Close the pipes. `kill` leaves them open: another thread may be reading from them."""
        with suppress(AttributeError):  # the process did not start
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
        """The next message. Raises EOFError if the child ends before it is complete."""
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
        """The message of ChildStopped. signal_number: the signal that ended the process, or minus
        its exit status; all but SIGPROF and SIGSEGV count as a lack of memory."""
        if signal_number == signal.SIGPROF:
            return f"it takes more than {self._limits.cpu_seconds:g} seconds"
        if signal_number == signal.SIGSEGV:
            return "it is nested too deeply"
        return f"it needs more than {self._limits.memory_bytes >> 20} MiB of memory"


def _unwrapped(answer: Any) -> Any:
    """The result in an answer. Raises the error in it."""
    if "error" in answer:
        raise PassError(answer["error"])
    if "bug" in answer:
        raise RuntimeError(f"in a child process:\n{answer['bug']}")
    return answer["result"]


@lru_cache(maxsize=1)
def interpreter() -> str:
    """A Python interpreter of this process's version. (If Python is embedded, as in Triton's stub,
    `sys.executable` is not one.) Raises PassError if none is found."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    prefix = Path(sys.base_exec_prefix, "bin")
    name = f"python{version}"
    names = (os.environ.get(PYTHON_VARIABLE), sys.executable, prefix / name, name, "python3")
    for each in names:
        if not each or not (path := shutil.which(each)) or not Path(path).name.startswith("python"):
            continue
        done = subprocess.run([path, "-I", "-S", "-V"], capture_output=True, text=True, check=False)
        if done.stdout.startswith(f"Python {version}."):
            return path
    raise PassError(
        f"no interpreter of Python {version} is found for child processes; set "
        f"{PYTHON_VARIABLE} to one"
    )


def serve(target: str) -> None:
    """The child's main function: serves calls of `target` until standard input is closed."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between messages
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
        # of CPU time, after which SIGPROF ends the process
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = _answer(function, message[0])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, answer)
        if forks:
            os._exit(0)


def _answer(function: Callable[[Any], Any], value: Any) -> dict[str, Any]:
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
    """The next message, or [] at the end of the input."""
    header = source.read(HEADER.size)
    message: list[Any] = json.loads(source.read(HEADER.unpack(header)[0])) if header else []
    return message


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _address_space() -> int:
    """The size of this process's virtual memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
