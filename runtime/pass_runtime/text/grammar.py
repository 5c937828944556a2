"""Compiles constraints, first in a child process with limits, and follows texts in their grammars.

There is one queue: a slow constraint may delay others by up to 2 s of CPU time, but no text without
a constraint."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pass_runtime.errors import FORKED, OfOneProcess, PassError
from pass_runtime.text.child import Child, ChildStopped, Limits
from pass_runtime.text.compiler import Compiler, error_clause
from pass_runtime.text.constraint import Constraint

START_CPU_SECONDS, ROW_CPU_SECONDS = 0.1, 0.002
"""What the masks of a text may take at first, and for each: other texts wait for them."""


class ConstraintStopped(PassError):
    """A text cannot follow its constraint any longer."""


@dataclass
class CpuUsage:
    """The CPU time of all masks of a grammar, with which its memory grows."""

    seconds: float = 0.0


class GrammarState(OfOneProcess):
    """One text's state. Methods raise ConstraintStopped if the text cannot go on."""

    def __init__(self, matcher: Any, end_tokens: Sequence[int], usage: CpuUsage) -> None:
        self._matcher, self._end_tokens, self._usage = matcher, end_tokens, usage
        self._seconds, self._rows = 0.0, 0

    def copy(self) -> GrammarState:
        """Return an equal state for another text, with its own budget of CPU time."""
        return GrammarState(self._matcher.deep_copy(), self._end_tokens, self._usage)

    def advance(self, token: int) -> None:
        with self._timed():
            if not self._matcher.consume_token(token):
                raise self._stopped()

    def fill(self, allowed: npt.NDArray[np.uint32], drafts: Sequence[int]) -> None:
        """Write the tokens that may follow the text and drafts[:i] into row i of `allowed`
        [P,V/32] uint32, up to a draft that is forbidden or ends the text."""
        with self._timed():
            self._fill(allowed, drafts)

    def _fill(self, allowed: npt.NDArray[np.uint32], drafts: Sequence[int]) -> None:
        taken = 0
        try:
            for row in range(len(allowed)):
                self._rows += 1
                self._matcher.unsafe_compute_mask_ptr(allowed[row].ctypes.data, allowed[row].nbytes)
                if self._matcher.is_error():
                    raise self._stopped()
                if row == len(drafts) or drafts[row] in self._end_tokens:
                    return
                if not self._matcher.try_consume_tokens([drafts[row]]):
                    return
                taken += 1
        finally:
            if taken:
                self._matcher.rollback(taken)

    def forced(self) -> tuple[int, ...]:
        """Return the next tokens as far as the grammar leaves no choice."""
        with self._timed():
            return tuple(self._matcher.compute_ff_tokens())

    def _stopped(self) -> ConstraintStopped:
        return ConstraintStopped(
            f"the constraint cannot be followed further: {error_clause(self._matcher.get_error())}"
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        spent = time.thread_time() - started
        self._seconds += spent
        self._usage.seconds += spent
        if self._seconds > START_CPU_SECONDS + ROW_CPU_SECONDS * self._rows:
            raise ConstraintStopped(
                f"the constraint takes more than {1000 * ROW_CPU_SECONDS:g} ms a token to follow, "
                "which would slow other requests down; simplify it"
            )


MIB = 1 << 20
CHECKER = "pass_runtime.text.compiler:make_checker"
LIMITS = Limits(cpu_seconds=2.0, memory_bytes=256 * MIB, stack_bytes=2 * MIB)
THREAD_STACK_BYTES = 8 * LIMITS.stack_bytes
MAX_JOBS = 64
MAX_GRAMMARS, MAX_CACHE_BYTES = 64, 128 * MIB
"""The most compiled grammars that are kept, and their most memory by estimate."""
MIN_GRAMMAR_BYTES = MIB // 4
BYTES_PER_SECOND = 128 * MIB
"""How much a grammar's memory grows in a second of CPU time for masks."""
MAX_REFUSALS = 256


class TooManyConstraints(PassError):
    """The queue of constraints is full."""

    def __init__(self) -> None:
        super().__init__("too many constraints are being compiled; try again later")


class _Refused(PassError):
    """A constraint is not valid or too complex."""


@dataclass(frozen=True)
class _CachedGrammar:
    future: Future[GrammarState]
    size: int
    usage: CpuUsage

    @property
    def bytes(self) -> int:
        return self.size + int(BYTES_PER_SECOND * self.usage.seconds)


class Grammars:
    """Compiles and keeps the grammars of one model. Any thread may call the methods."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """end_tokens: the ids that end a text."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_tokens = list(end_tokens)
        self._lock = threading.Lock()  # never held while something is compiled
        self._cached: OrderedDict[bytes, _CachedGrammar] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._futures = WeakValueDictionary[bytes, Future[GrammarState]]()
        """By constraint: in compilation, cached, or held by a caller of `prepare`."""
        self._child: Child | None = None
        self._compiler: Compiler | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._num_jobs = 0
        self._closed, self._owner = False, os.getpid()

    def start(self, constraint: Constraint) -> GrammarState:
        """Return the state of an empty text. Raises as `prepare`."""
        return self.prepare(constraint).result().copy()

    def prepare(self, constraint: Constraint) -> Future[GrammarState]:
        """Return a future of the state that `start` copies. Equal constraints share it: do not
        cancel it. It raises PassError if the constraint is not valid or too complex. Raises
        TooManyConstraints if the queue is full, PassError if the session is closed."""
        if os.getpid() != self._owner:
            raise PassError(FORKED)
        if not self._end_tokens:
            raise PassError("the model has no token that ends a text, which a constraint needs")
        key = hashlib.blake2b(repr(constraint).encode(), digest_size=16).digest()
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)  # the most recently used is last
            if (future := self._futures.get(key)) is not None:
                return future
            future = Future()
            if key in self._refused:
                self._refused.move_to_end(key)
                future.set_exception(PassError(self._refused[key]))
                return future
            if self._closed:
                raise PassError("the session is closed")
            if self._num_jobs >= MAX_JOBS:
                raise TooManyConstraints
            if self._thread is None:
                self._thread = _thread_with_stack(THREAD_STACK_BYTES)
            self._thread.submit(self._run, key, constraint, future)
            self._num_jobs += 1
            self._futures[key] = future
            return future

    def close(self) -> None:
        """End the child process. Futures of constraints that are being compiled get an error."""
        with self._lock:
            self._closed = True
            futures = [*self._futures.values()]
        if os.getpid() == self._owner:
            if self._thread is not None:
                self._thread.shutdown(wait=False, cancel_futures=True)
            if self._child is not None:
                self._child.close()
        for future in futures:
            with suppress(InvalidStateError):  # It has a result already.
                future.set_exception(PassError("the session is closed"))

    def _run(self, key: bytes, constraint: Constraint, future: Future[GrammarState]) -> None:
        try:
            matcher, size = self._compile(constraint)
            usage = CpuUsage()
            with suppress(InvalidStateError):  # The session was closed meanwhile.
                future.set_result(GrammarState(matcher, self._end_tokens, usage))
            with self._lock:
                self._cache(key, _CachedGrammar(future, max(size, MIN_GRAMMAR_BYTES), usage))
        except BaseException as error:  # The future raises it for those who wait.
            with self._lock:
                self._futures.pop(key, None)
                if isinstance(error, _Refused):
                    self._refused[key] = str(error)
                    if len(self._refused) > MAX_REFUSALS:
                        self._refused.popitem(last=False)
            with suppress(InvalidStateError):
                future.set_exception(error)
        finally:
            with self._lock:
                self._num_jobs -= 1

    def _compile(self, constraint: Constraint) -> tuple[Any, int]:
        if self._child is None or self._compiler is None:
            setup: dict[str, Any] = {
                "tokenizer": self._tokenizer.to_str(),
                "vocab_size": self._vocab_size,
                "end_tokens": self._end_tokens,
            }
            self._child = Child(CHECKER, setup, LIMITS)
            self._child.start()
            self._compiler = Compiler(**setup)  # while the child starts
        try:
            answer = self._child.call(asdict(constraint))
        except ChildStopped as error:
            if self._closed:
                raise
            why = f"the {constraint.kind} is too complex to compile: {error}; simplify it"
            raise _Refused(why) from None
        if "refused" in answer:
            raise _Refused(answer["refused"])
        matcher = self._compiler.compile(constraint)
        matcher.compute_ff_tokens()  # Find the first forced tokens once, for all copies.
        return matcher, answer["bytes"]

    def _cache(self, key: bytes, grammar: _CachedGrammar) -> None:
        cached = self._cached
        cached[key] = grammar
        while (
            len(cached) > MAX_GRAMMARS
            or sum(each.bytes for each in cached.values()) > MAX_CACHE_BYTES
        ):
            cached.popitem(last=False)


_STACK_SIZE_LOCK = threading.Lock()


def _thread_with_stack(size: int) -> ThreadPoolExecutor:
    with _STACK_SIZE_LOCK:
        before = threading.stack_size(size)
        try:
            thread = ThreadPoolExecutor(1, "pass-constraints")
            thread.submit(int).result()  # starts the thread
        finally:
            threading.stack_size(before)
    return thread
