"""Runs a function in a child process that forks for every call, with limits of time, memory and
stack: no exception handler survives a stack overflow in C."""

from __future__ import annotations

import json
import os
import resource
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import threading
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
"""What precedes a message in JSON: its length in bytes."""
WALL_SECONDS_PER_CPU_SECOND = 20
START_SECONDS = 60
PYTHON_VARIABLE = "PASS_PYTHON"
"""The environment variable that names the interpreter of the child."""
ONE_THREAD_VARIABLES = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
CHILD_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from pass_runtime.text.child import "
    "serve; serve({target!r})"
)


@dataclass(frozen=True)
class Limits:
    """Limits of one call. memory_bytes: beside what the set-up took."""

    cpu_seconds: float
    memory_bytes: int
    stack_bytes: int = 4 << 20


class ChildStopped(PassError):
    """The function exceeded a limit. The message is a clause: "it takes more than 2 seconds"."""


class Child(OfOneProcess):
    """A child process for one function. Any thread may call the methods; calls take turns."""

    def __init__(self, target: str, setup: object, limits: Limits) -> None:
        """target: "module:name" of a function that starts no threads. It gets `setup`, and returns
        the function for the calls. All values are JSON values."""
        self._target, self._setup, self._limits = target, setup, limits
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_set_up = False

    @property
    def pid(self) -> int | None:
        """The process id; None if the child is not running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start the child if it is not running. Raises PassError if that is impossible."""
        if os.getpid() != self._owner:
            raise PassError(FORKED)
        if self.pid is not None:
            return
        self._close_pipes()
        # An editable install may find this package in another way than by sys.path.
        package = str(Path(__file__).parents[2])
        program = CHILD_PROGRAM.format(path=[*sys.path, package], target=self._target)
        self._process = subprocess.Popen(
            [interpreter(), "-I", "-S", "-c", program],  # with the parent's sys.path alone
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | ONE_THREAD_VARIABLES,
            start_new_session=True,  # so that Ctrl-C reaches the parent alone
        )
        weakref.finalize(self, _end, self._process, self._owner)
        limits, self._is_set_up = self._limits, False
        settings = [limits.cpu_seconds, limits.memory_bytes, limits.stack_bytes]
        with suppress(BrokenPipeError):  # `call` says why.
            _write(self._process.stdin, [self._setup, *settings])

    def call(self, value: object) -> Any:
        """Return the function's result. Raises ChildStopped if it exceeds a limit or the child
        ends, PassError if it raises one or no child can start, RuntimeError for other errors."""
        with self._lock:
            self.start()
            assert self._process is not None
            try:
                if not self._is_set_up:
                    _unwrapped(self._read(START_SECONDS))
                    self._is_set_up = True
                _write(self._process.stdin, [value])
                answer = self._read(self._limits.cpu_seconds * WALL_SECONDS_PER_CPU_SECOND)
            except (BrokenPipeError, EOFError):
                raise ChildStopped(self._why_ended(-self._process.wait())) from None
            except BaseException:  # After an interrupt, too, the child cannot serve another call.
                self.close()
                raise
        if "signal" in answer:
            raise ChildStopped(self._why_ended(answer["signal"]))
        return _unwrapped(answer)

    def close(self) -> None:
        if self._process is not None:
            _end(self._process, self._owner)

    def _close_pipes(self) -> None:
        """Close the pipes, which `close` cannot: another thread may be reading from them."""
        for pipe in () if self._process is None else (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    __del__ = _close_pipes

    def _read(self, seconds: float) -> Any:
        assert self._process is not None and self._process.stdout is not None
        source, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        read, size = bytearray(), HEADER.size
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while len(read) < size:
                if not selector.select(max(deadline - time.monotonic(), 0)):
                    raise ChildStopped("it does not end in time")
                if not (part := os.read(source, 1 << 20)):
                    raise EOFError
                read += part
                if len(read) >= HEADER.size:
                    size = HEADER.size + HEADER.unpack_from(read)[0]
        return json.loads(read[HEADER.size :])

    def _why_ended(self, signal_number: int) -> str:
        """Other signals, and exit statuses (negative here), are taken for a lack of memory."""
        if signal_number == signal.SIGPROF:
            return f"it takes more than {self._limits.cpu_seconds:g} seconds"
        if signal_number == signal.SIGSEGV:
            return "it is nested too deeply"
        return f"it needs more than {self._limits.memory_bytes >> 20} MiB of memory"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the child and its fork
        process.wait()


def _unwrapped(answer: Any) -> Any:
    if "error" in answer:
        raise PassError(answer["error"])
    if "bug" in answer:
        raise RuntimeError(f"in a child process:\n{answer['bug']}")
    return answer["result"]


@lru_cache(maxsize=1)
def interpreter() -> str:
    """Return the path of a Python interpreter of this process's version, which `sys.executable` is
    not if Python is embedded, as in Triton's stub. Raises PassError if none is found."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    name = f"python{version}"
    in_prefix = Path(sys.base_exec_prefix, "bin", name)
    for each in (os.environ.get(PYTHON_VARIABLE), sys.executable, in_prefix, name, "python3"):
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
    setup, seconds, memory, stack = _next_message(source)
    try:
        module, _, name = target.partition(":")
        function: Callable[[Any], Any] = getattr(import_module(module), name)(setup)
    except PassError as error:
        _write(sink, {"error": str(error)})
        return
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_STACK, stack)
    address_space = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _set_limit(resource.RLIMIT_AS, address_space + memory)
    _write(sink, {"result": None})
    while message := _next_message(source):
        if fork := os.fork():
            if exit_code := os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]):
                _write(sink, {"signal": -exit_code})
            continue
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF then ends the fork.
        answer = _answer(function, message[0])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, answer)
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


def _write(sink: IO[bytes] | None, message: object) -> None:
    assert sink is not None
    data = json.dumps(message).encode()
    sink.write(HEADER.pack(len(data)) + data)
    sink.flush()


def _next_message(source: IO[bytes]) -> list[Any]:
    header = source.read(HEADER.size)
    message: list[Any] = json.loads(source.read(HEADER.unpack(header)[0])) if header else []
    return message


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
