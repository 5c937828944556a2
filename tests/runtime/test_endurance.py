from __future__ import annotations

import ctypes
import gc
import multiprocessing
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from faulty import FaultyBackend, Fuse, session_of
from mixed_requests import PLANS, SAMPLING, TEXTS, MixedRequest, PlainDecoder, random_request
from process_memory import anonymous_bytes
from reciting import assert_idle, engine_of

from pass_runtime import GenerateOptions, PassError, Session, load
from pass_runtime.backends.base import Batch
from pass_runtime.bundle.sampling import SAMPLERS

REQUESTS, REQUESTS_PER_WAVE = 2000, 25
ALLOWED_GROWTH = {"resident": 4 << 20, "heap": 256 << 10, "objects": 1000}
"""After the warm-up, in bytes or objects."""


class HeapInfo(ctypes.Structure):
    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def memory_now() -> dict[str, int]:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = HeapInfo
    gc.collect()
    heap = mallinfo2()
    return {
        "resident": anonymous_bytes(),
        "heap": heap.uordblks + heap.hblkhd,
        "objects": len(gc.get_objects()),
    }


def requests_for_every_tail() -> Iterator[MixedRequest]:
    """A tail keeps the memory that it takes at its first use."""
    for sampling in SAMPLING:
        for plan, logprobs in product(PLANS, (None, 2)):
            yield MixedRequest(TEXTS[1], sampling, 8, plan=plan, logprobs=logprobs)
        for plan, lookahead in product(("two-pass", "fused"), range(1, 7)):
            yield MixedRequest(TEXTS[1], sampling, 8, plan=plan, lookahead=lookahead)


def warm_up(session: Session, slots: int) -> None:
    for window, sampler in product(session.manifest.layouts, SAMPLERS):
        batch = Batch(window, 1, sampler)
        session.call(lambda engine, batch=batch: engine.time_pass(batch))  # type: ignore[misc]
    for request in requests_for_every_tail():
        for stream in [session.generate(request.text, request.options()) for _ in range(slots)]:
            stream.result()


def run_wave(session: Session, chance: random.Random) -> Counter[str]:
    session.backend.fuses["run_trunk"] = Fuse(PassError("out of luck"), chance.randrange(1, 200))  # type: ignore
    texts = [
        TEXTS[-1] if chance.random() < 0.03 else chance.choice(TEXTS[:-1])
        for _ in range(REQUESTS_PER_WAVE)
    ]
    requests = [random_request(chance, text, max_tokens=8) for text in texts]
    streams = [session.generate(request.text, request.options()) for request in requests]
    for stream in chance.sample(streams, 2):
        stream.cancel()
    del streams[chance.randrange(REQUESTS_PER_WAVE)]
    reasons = Counter[str]()
    for stream in streams:
        try:
            stream.result()
        except PassError as error:
            assert str(error) == "out of luck"
        assert stream.finish_reason is not None
        reasons[stream.finish_reason] += 1
    return reasons


@pytest.mark.slow
def test_memory_does_not_grow_in_two_thousand_requests(tiny_bundle: Path):
    """In a process of its own: requests could take memory that other tests have freed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(run_requests, tiny_bundle).result()


def run_requests(tiny_bundle: Path) -> None:
    chance, backend = random.Random(0), FaultyBackend(tiny_bundle, slots=4)
    session, reasons, capacities = session_of(backend), Counter[str](), set[int]()
    measured = list[dict[str, int]]()
    warm_up(session, 4)
    for number in range(REQUESTS // REQUESTS_PER_WAVE):
        reasons += run_wave(session, chance)
        capacities.add(backend.capacity)
        if number % 4 == 3:
            backend.fuses.clear()
            # After a short request the KV cache always has the same capacity.
            session.generate(TEXTS[0], GenerateOptions(1)).result()
            # Memory of the prefix cache does not count: it may grow up to its budget.
            memory, saved = memory_now(), engine_of(session)._store.used_bytes
            measured.append(memory | {"heap": memory["heap"] - saved})
    assert set(reasons) == {"stop", "length", "cancelled", "error"}
    assert min(reasons.values()) >= 20, reasons
    assert len(capacities) > 1
    for name, allowed in ALLOWED_GROWTH.items():
        values = [each[name] for each in measured]
        assert min(values[-3:]) - min(values[3:6]) < allowed, (name, values)
    assert_idle(session)
    assert engine_of(session).idle
    request = MixedRequest(TEXTS[1], SAMPLING[2], 12, plan="fused")
    plain = PlainDecoder(load(tiny_bundle, "cpu", threads=1))
    plain.assert_same(request, session.generate(request.text, request.options()).result().token_ids)
    assert_idle(plain.session)
    session.close()
    plain.session.close()
    threads = (thread for thread in threading.enumerate() if thread.name == "pass-decode")
    assert not any(thread.is_alive() for thread in threads)
