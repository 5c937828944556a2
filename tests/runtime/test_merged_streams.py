"""Several requests read by one task: all pieces of each in order, its end last, and its failure."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reciting import assert_idle, reciting_session, words

from pass_runtime import GenerateOptions, PassError
from pass_runtime.generation import merged


def asked(tokens: int, plan: str = "two-pass") -> GenerateOptions:
    return GenerateOptions(tokens, plan=plan, ignore_eos=True)


async def read(streams):
    async with aclosing(merged(streams)) as items:
        return [item async for item in items]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 40), max_size=5), st.integers(1, 3))
def test_every_piece_of_each_stream_comes_in_order(tiny_bundle, lengths, slots):
    session = reciting_session(tiny_bundle, slots=slots)

    async def both():
        return await read(
            [session.generate_ids([5] * (place + 1), asked(n)) for place, n in enumerate(lengths)]
        )

    items = asyncio.run(both())
    for place, length in enumerate(lengths):
        *pieces, end = [item for at, item in items if at == place]
        assert end is None
        written = [token for piece in pieces for token in piece]
        assert written == [words(place + 1 + i) for i in range(length)]
    assert {place for place, _ in items} == set(range(len(lengths)))
    assert_idle(session)


def test_pieces_of_both_streams_alternate(tiny_bundle):
    session = reciting_session(tiny_bundle, slots=2)

    async def both():
        return await read([session.generate_ids([5] * n, asked(200, "ar")) for n in (1, 2)])

    order = [place for place, _ in asyncio.run(both())]
    assert 0 in order[order.index(1) :] and order[:400] != sorted(order[:400])


def test_a_failure_is_raised(tiny_bundle):
    session = reciting_session(tiny_bundle, slots=2)

    def fail(kind):
        raise PassError("no more")

    session.backend.run = fail  # type: ignore[method-assign]

    async def both():
        return await read([session.generate_ids([5] * n, asked(9)) for n in (1, 2)])

    with pytest.raises(PassError, match="no more"):
        asyncio.run(both())


def test_a_stream_that_was_read_is_refused(tiny_bundle):
    session = reciting_session(tiny_bundle)
    stream = session.generate_ids([5], asked(3)).result()
    with pytest.raises(PassError, match="read to its end"):
        asyncio.run(read([stream]))


def test_pieces_know_when_they_were_written(tiny_bundle):
    """And not when they were read."""
    session = reciting_session(tiny_bundle)
    before = time.perf_counter()
    generation = session.generate("The quick", asked(5, "ar"))
    generation._sequence.ended.wait(20)
    after = time.perf_counter()
    time.sleep(0.05)
    written = [piece.written for piece in generation if piece.tokens]
    assert written == sorted(written) and before < written[0] and written[-1] < after
