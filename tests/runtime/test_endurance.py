"""Thousands of requests in one process, with cancellations, failures and growth: nothing piles up."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import psutil
from faulty import FaultyBackend, Fuse, session_of
from mixed_requests import PLANS, SAMPLING, STOPS, TEXTS, Alone, Asked
from reciting import assert_idle, runner_of

from pass_runtime import PassError, Session, load

REQUESTS, WAVE = 2000, 25
FLAT = 4 << 20
"""Bytes that the process may grow by behind the warm-up: rare kinds of request open tails of their own late."""
OBJECTS = 1000
"""Python objects that may come to be there behind the warm-up; a request is dozens of them."""


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
    """Some requests at once, of which some are cancelled, or dropped unread, or fail."""
    session.backend.fuses["run_trunk"] = Fuse(PassError("out of luck"), chance.randrange(1, 200))  # type: ignore
    streams = [session.submit((asked := some_request(chance)).text, asked.options()) for _ in range(WAVE)]
    for stream in chance.sample(streams, 2):
        stream.cancel()
    del streams[chance.randrange(WAVE)]
    ends: dict[str, int] = {}
    for stream in streams:
        try:
            stream.run()
        except PassError as error:
            assert str(error) == "out of luck"
        reason = stream.finish_reason
        assert reason is not None
        ends[reason] = ends.get(reason, 0) + 1
    return ends


def test_two_thousand_requests(tiny_bundle: Path):
    """In a process of its own: what other tests freed, and the allocator takes into use again, is no growth."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        fresh.submit(serve_many, tiny_bundle).result()


def serve_many(tiny_bundle: Path) -> None:
    process, chance = psutil.Process(), random.Random(0)
    backend = FaultyBackend(tiny_bundle, slots=4)
    session, ends, capacities = session_of(backend), dict[str, int](), set[int]()
    sizes, objects = list[int](), list[int]()
    for number in range(REQUESTS // WAVE):
        for reason, count in wave(session, chance).items():
            ends[reason] = ends.get(reason, 0) + count
        capacities.add(backend.capacity)
        if number % 4 == 3:
            gc.collect()
            sizes.append(process.memory_info().rss)
            objects.append(len(gc.get_objects()))
    assert set(ends) == {"stop", "length", "cancelled", "error"} and min(ends.values()) >= 20, ends
    assert len(capacities) > 1
    assert min(sizes[-3:]) - min(sizes[5:8]) < FLAT, [size >> 20 for size in sizes]
    assert min(objects[-3:]) - min(objects[5:8]) < OBJECTS, objects
    assert_idle(session)
    assert not runner_of(session).busy
    asked = Asked(TEXTS[1], SAMPLING[2], 12, plan="fused")
    backend.fuses.clear()
    alone = Alone(load(tiny_bundle, "cpu", threads=1))
    alone.assert_same(asked, session.generate(asked.text, asked.options()).run().token_ids)
    session.close()
    assert_idle(alone.session)
    assert not [thread for thread in threading.enumerate() if thread.name == "pass-decode" and thread.is_alive()]
