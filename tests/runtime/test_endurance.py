"""Thousands of requests in one process, some cancelled, some failing: memory stays bounded."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from faulty import FaultyBackend, Fuse, session_of
from mixed_requests import PLANS, SAMPLING, STOPS, TEXTS, Alone, Asked
from process_memory import anonymous_bytes
from reciting import assert_idle, runner_of

from pass_runtime import GenerateOptions, PassError, Session, load

REQUESTS, WAVE = 2000, 25
ALLOWED_GROWTH = {"resident": 4 << 20, "heap": 256 << 10, "objects": 1000}
"""By how much the values of `memory_now` may grow after the warm-up, in bytes or objects. The
allocator keeps pages or gives them back as it likes, so that the resident size varies; the heap
counts only blocks in use. 2,000 requests that were kept would be tens of thousands of Python
objects."""


class HeapInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def memory_now() -> dict[str, int]:
    """Bytes of memory pages and of heap blocks in use, and the number of Python objects."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = HeapInfo
    gc.collect()
    heap = mallinfo2()
    return {
        "resident": anonymous_bytes(),
        "heap": heap.uordblks + heap.hblkhd,
        "objects": len(gc.get_objects()),
    }


def one_of_each() -> Iterator[Asked]:
    """Requests that need every tail there is: a tail takes memory at its first use and keeps it."""
    for sampling in SAMPLING:
        for plan, logprobs in product(PLANS, (None, 2)):
            yield Asked(TEXTS[1], sampling, 8, plan=plan, logprobs=logprobs)
        for plan, lookahead in product(("two-pass", "fused"), range(1, 7)):
            yield Asked(TEXTS[1], sampling, 8, plan=plan, lookahead=lookahead)


def warm_up(session: Session, slots: int) -> None:
    for asked in one_of_each():
        for stream in [session.generate(asked.text, asked.options()) for _ in range(slots)]:
            stream.result()


def some_request(chance: random.Random) -> Asked:
    return Asked(
        TEXTS[-1] if chance.random() < 0.03 else chance.choice(TEXTS[:-1]),
        chance.choice(SAMPLING),
        chance.randrange(1, 9),
        chance.choice(STOPS),
        plan=chance.choice(PLANS),
        logprobs=chance.choice([None, None, 2]),
        reuse_prefix=chance.random() < 0.2,
    )


def wave(session: Session, chance: random.Random) -> dict[str, int]:
    """Begin WAVE requests at once, of which two are cancelled and one is dropped; a pass may fail.
    Return how many ended for each reason."""
    session.backend.fuses["run_trunk"] = Fuse(PassError("out of luck"), chance.randrange(1, 200))  # type: ignore
    requests = [some_request(chance) for _ in range(WAVE)]
    streams = [session.generate(asked.text, asked.options()) for asked in requests]
    for stream in chance.sample(streams, 2):
        stream.cancel()
    del streams[chance.randrange(WAVE)]
    ends: dict[str, int] = {}
    for stream in streams:
        try:
            stream.result()
        except PassError as error:
            assert str(error) == "out of luck"
        reason = stream.finish_reason
        assert reason is not None
        ends[reason] = ends.get(reason, 0) + 1
    return ends


@pytest.mark.slow
def test_memory_does_not_grow_in_two_thousand_requests(tiny_bundle: Path):
    """In a process of its own, where no other test has freed memory that is used again here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        fresh.submit(run_thousands, tiny_bundle).result()


def run_thousands(tiny_bundle: Path) -> None:
    chance, backend = random.Random(0), FaultyBackend(tiny_bundle, slots=4)
    session, ends, capacities = session_of(backend), dict[str, int](), set[int]()
    measured = list[dict[str, int]]()
    warm_up(session, 4)
    for number in range(REQUESTS // WAVE):
        for reason, count in wave(session, chance).items():
            ends[reason] = ends.get(reason, 0) + count
        capacities.add(backend.capacity)
        if number % 4 == 3:
            backend.fuses.clear()
            # After a short request the KV cache always has the same capacity.
            session.generate(TEXTS[0], GenerateOptions(1)).result()
            # The prefix cache may grow, up to its budget.
            memory = memory_now()
            measured.append(memory | {"heap": memory["heap"] - runner_of(session)._store.used})
    assert set(ends) == {"stop", "length", "cancelled", "error"} and min(ends.values()) >= 20, ends
    assert len(capacities) > 1
    for name, allowed in ALLOWED_GROWTH.items():
        values = [each[name] for each in measured]
        assert min(values[-3:]) - min(values[3:6]) < allowed, (name, values)
    assert_idle(session)
    assert not runner_of(session).busy
    asked = Asked(TEXTS[1], SAMPLING[2], 12, plan="fused")
    alone = Alone(load(tiny_bundle, "cpu", threads=1))
    alone.assert_same(asked, session.generate(asked.text, asked.options()).result().token_ids)
    session.close()
    assert_idle(alone.session)
    threads = (thread for thread in threading.enumerate() if thread.name == "pass-decode")
    assert not any(thread.is_alive() for thread in threads)
