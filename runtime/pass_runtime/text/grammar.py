"""Compiles constraints to grammars (`Grammars`), and follows the state of a text in its grammar
(`GrammarState`).

A constraint goes through up to three queues. It is first compiled in a child process within
QUICK_LIMITS. If it exceeds these limits, it is compiled in another child within LONG_LIMITS. If a
child has compiled it, a thread of this process compiles it again. So constraints that compile
quickly, as nearly all do, do not wait for slow ones, and texts without a constraint never wait.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pass_runtime.errors import FORKED, OfOneProcess, PassError
from pass_runtime.text.child import ChildPool, ChildStopped, Limits
from pass_runtime.text.compiler import Compiler, error_clause
from pass_runtime.text.constraint import Constraint

START_CPU_SECONDS = 0.1
ROW_CPU_SECONDS = 0.002
"""The masks of a text (the sets of tokens that may follow, one for each row) may take CPU time of
START_CPU_SECONDS + ROW_CPU_SECONDS * (how many there were so far), because the thread that computes
them decodes all other texts, too. `compiler.STEP_LIMITS` limit each mask."""


class ConstraintStopped(PassError):
    """A text cannot follow its constraint any longer."""


@dataclass
class CpuUsage:
    """How much one compiled grammar was used. seconds: the CPU time of all masks computed with it.
    The grammar's memory grows with these: it keeps the states of its lexer, for all texts."""

    seconds: float = 0.0


class GrammarState(OfOneProcess):
    """One text's state in its grammar. Methods raise ConstraintStopped if the text cannot go on."""

    def __init__(self, matcher: Any, end_tokens: Sequence[int], usage: CpuUsage) -> None:
        self._matcher, self._end_tokens, self._usage = matcher, end_tokens, usage
        self._seconds, self._rows = 0.0, 0

    def copy(self) -> GrammarState:
        """Return an equal state for another text, which has its own budget of CPU time."""
        return GrammarState(self._matcher.deep_copy(), self._end_tokens, self._usage)

    def advance(self, token: int) -> None:
        """Take the next token of the text."""
        with self._timed():
            if not self._matcher.consume_token(token):
                raise self._stopped()

    def fill(self, allowed: npt.NDArray[np.uint32], drafts: Sequence[int]) -> None:
        """Write the set of tokens that may follow the text and drafts[:i] into row i of `allowed`
        [P,V/32], a bit for each token. Rows after a draft that the grammar forbids or that ends the
        text, and rows without a draft, are left as they are."""
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
        """Return the next tokens as far as the grammar leaves no choice; () if it leaves one."""
        with self._timed():
            return tuple(self._matcher.compute_ff_tokens())

    def _stopped(self) -> ConstraintStopped:
        return ConstraintStopped(
            f"the constraint cannot be followed further: {error_clause(self._matcher.get_error())}"
        )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the CPU time of a block. Raises ConstraintStopped if it exceeds the budget."""
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
"""What the children run (see `ChildPool`)."""
CHILD_STACK_BYTES = 2 * MIB
QUICK_LIMITS = Limits(0.25, 256 * MIB, CHILD_STACK_BYTES)
LONG_LIMITS = Limits(2.0, 256 * MIB, CHILD_STACK_BYTES)
"""What the first and the second child may take for a constraint."""
THREAD_STACK_BYTES = 8 * CHILD_STACK_BYTES
"""The stack of the thread that compiles after a child, larger than the child's to be enough."""
MAX_QUICK_JOBS, MAX_LONG_JOBS = 128, 16
"""The most constraints in the queues of the first and the second child."""
MAX_GRAMMARS, MAX_CACHE_BYTES = 64, 128 * MIB
"""The most compiled grammars that are kept, and the most memory that they may take by estimate."""
MIN_GRAMMAR_BYTES = MIB // 4
"""The least estimate of a compiled grammar's memory."""
BYTES_PER_SECOND = 128 * MIB
"""How much a grammar's memory grows, at most, in a second of CPU time for masks."""
MAX_REFUSALS = 256
"""The most refused constraints that are remembered, with the reasons."""


class TooManyConstraints(PassError):
    """The queues of constraints are full."""

    def __init__(self) -> None:
        super().__init__("too many constraints are being compiled; try again later")


@dataclass(eq=False)
class _Job:
    """A constraint that is being compiled."""

    key: bytes
    constraint: Constraint
    future: Future[GrammarState]


@dataclass(frozen=True)
class _CachedGrammar:
    """A compiled grammar, in a future that is done. size: the bytes that compiling it took."""

    future: Future[GrammarState]
    size: int
    usage: CpuUsage

    @property
    def bytes(self) -> int:
        """An estimate of the memory that the grammar takes now."""
        return self.size + int(BYTES_PER_SECOND * self.usage.seconds)


class _Queue:
    """A queue of jobs for one thread. waiting: how many jobs it has, the running one included."""

    def __init__(self, limit: int, stack: int = 0) -> None:
        """limit: the most jobs. stack: the bytes of the thread's stack; 0 is Python's default."""
        self.limit, self.waiting = limit, 0
        self.thread = ThreadPoolExecutor(1, "pass-constraints")
        with _STACK_SIZE_LOCK:
            before = threading.stack_size(stack)
            try:
                self.thread.submit(int).result()  # starts the thread
            finally:
                threading.stack_size(before)


_STACK_SIZE_LOCK = threading.Lock()
"""Held while the stack size of new threads, which the whole process shares, is not the default."""


class Grammars:
    """Compiles constraints for one model, and keeps the grammars. Any thread may call the methods.
    Child processes and threads are started with the first constraint."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """end_tokens: the ids that end a text, which the grammar allows once a text is complete."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = list(end_tokens)
        self._lock = threading.Lock()  # never held while something is compiled
        self._cached: OrderedDict[bytes, _CachedGrammar] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._futures = WeakValueDictionary[bytes, Future[GrammarState]]()
        """Futures by constraint: in compilation, cached, or held by a caller of `prepare`."""
        self._started = False
        self._closed, self._owner = False, os.getpid()

    def start(self, constraint: Constraint) -> GrammarState:
        """Return the state of an empty text. Raises as `prepare` and its future do."""
        return self.prepare(constraint).result().copy()

    def prepare(self, constraint: Constraint) -> Future[GrammarState]:
        """Return a future of the state that `start` copies. Do not cancel it: equal constraints
        share one future.

        The future raises PassError if the constraint is not valid or too complex. `prepare` itself
        raises TooManyConstraints if the queues are full, and PassError if the session is closed or
        another process's.
        """
        if os.getpid() != self._owner:
            raise PassError(FORKED)
        if not self._end_tokens:
            raise PassError("the model has no token that ends a text, which a constraint needs")
        key = _key(constraint)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)  # the most recently used is last
            if (future := self._futures.get(key)) is None:
                future = Future()
                if key in self._refused:
                    self._refused.move_to_end(key)
                    future.set_exception(PassError(self._refused[key]))
                else:
                    self._begin(_Job(key, constraint, future))
        return future

    def close(self) -> None:
        """End the child processes. Futures of constraints that are being compiled get an error."""
        with self._lock:
            self._closed = True
            futures = [*self._futures.values()]
        if self._started and os.getpid() == self._owner:
            for queue in (self._quick, self._long, self._compiling):
                queue.thread.shutdown(wait=False, cancel_futures=True)
            self._quick_child.close()
            self._long_child.close()
        for future in futures:
            with suppress(InvalidStateError):  # It has a result already.
                future.set_exception(PassError("the session is closed"))

    def _begin(self, job: _Job) -> None:
        """Put a new job into the first queue. The caller holds the lock."""
        if self._closed:
            raise PassError("the session is closed")
        if not self._started:
            self._start_queues()
        self._add(self._quick, job, self._check_quickly)
        self._futures[job.key] = job.future

    def _start_queues(self) -> None:
        setup: dict[str, Any] = {
            "tokenizer": self._tokenizer.to_str(),
            "vocab_size": self._vocab_size,
            "end_tokens": self._end_tokens,
        }
        self._quick_child = ChildPool(CHECKER, setup, QUICK_LIMITS, forks=True)
        self._long_child = ChildPool(CHECKER, setup, LONG_LIMITS, forks=True)
        self._quick, self._long = _Queue(MAX_QUICK_JOBS), _Queue(MAX_LONG_JOBS)
        self._compiling = _Queue(MAX_QUICK_JOBS, THREAD_STACK_BYTES)
        self._compiler = self._compiling.thread.submit(Compiler, **setup)  # while children start
        self._started = True

    def _add(self, queue: _Queue, job: _Job, step: Callable[[_Job], None]) -> None:
        """Put a job into a queue for its next step. The caller holds the lock."""
        if queue.waiting >= queue.limit:
            raise TooManyConstraints
        queue.thread.submit(self._run, queue, job, step)
        queue.waiting += 1

    def _run(self, queue: _Queue, job: _Job, step: Callable[[_Job], None]) -> None:
        """Run one step of a job. An error ends the job."""
        try:
            step(job)
        except BaseException as error:  # The future raises it for those who wait.
            with self._lock:
                self._futures.pop(job.key, None)
            with suppress(InvalidStateError):  # The session was closed meanwhile.
                job.future.set_exception(error)
        finally:
            with self._lock:
                queue.waiting -= 1

    def _check_quickly(self, job: _Job) -> None:
        try:
            answer = self._quick_child.call(asdict(job.constraint))
        except ChildStopped:
            with self._lock:
                self._add(self._long, job, self._check_long)
        else:
            self._take_answer(job, answer)

    def _check_long(self, job: _Job) -> None:
        try:
            answer = self._long_child.call(asdict(job.constraint))
        except ChildStopped as error:
            if self._closed:
                raise
            kind = job.constraint.kind
            answer = {"refused": f"the {kind} is too complex to compile: {error}; simplify it"}
        self._take_answer(job, answer)

    def _take_answer(self, job: _Job, answer: dict[str, Any]) -> None:
        """Queue the job for compilation in this process, or refuse it, as the child answered."""
        with self._lock:
            if "refused" not in answer:
                self._add(self._compiling, job, partial(self._compile, size=answer["bytes"]))
                return
            self._refused[job.key] = answer["refused"]
            if len(self._refused) > MAX_REFUSALS:
                self._refused.popitem(last=False)
        raise PassError(answer["refused"])

    def _compile(self, job: _Job, size: int) -> None:
        """Compile a constraint here, and cache it. size: the bytes that it took in a child."""
        matcher, usage = self._compiler.result().compile(job.constraint), CpuUsage()
        matcher.compute_ff_tokens()  # Find the first forced tokens once, for all copies.
        with suppress(InvalidStateError):  # The session was closed meanwhile.
            job.future.set_result(GrammarState(matcher, self._end_tokens, usage))
        with self._lock:
            self._cached[job.key] = _CachedGrammar(job.future, max(size, MIN_GRAMMAR_BYTES), usage)
            cached = self._cached
            while (
                len(cached) > MAX_GRAMMARS
                or sum(each.bytes for each in cached.values()) > MAX_CACHE_BYTES
            ):
                cached.popitem(last=False)


def _key(constraint: Constraint) -> bytes:
    """Return a short hash of a constraint."""
    return hashlib.blake2b(repr(constraint).encode(), digest_size=16).digest()
