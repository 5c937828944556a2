"""`merged` reads several streams in one task: the pieces of each in order, then its end (None)."""

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


def options_for(tokens: int, plan: str = "two-pass") -> GenerateOptions:
    return GenerateOptions(tokens, plan=plan, ignore_eos=True)


async def read(streams):
    """Return all (index of the stream, piece or None)."""
    async with aclosing(merged(streams)) as items:
        return [item async for item in items]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 40), max_size=5), st.integers(1, 3))
def test_every_piece_of_each_stream_comes_in_order(tiny_bundle, lengths, slots):
    session = reciting_session(tiny_bundle, slots=slots)

    async def read_all():
        return await read(
            [
                session.generate_ids([5] * (index + 1), options_for(length))
                for index, length in enumerate(lengths)
            ]
        )

    items = asyncio.run(read_all())
    for index, length in enumerate(lengths):
        *pieces, end = [piece for stream, piece in items if stream == index]
        assert end is None
        written = [token for piece in pieces for token in piece]
        assert written == [words(index + 1 + i) for i in range(length)]
    assert {stream for stream, _ in items} == set(range(len(lengths)))
    assert_idle(session)


def test_pieces_of_both_streams_alternate(tiny_bundle):
    session = reciting_session(tiny_bundle, slots=2)

    async def read_both():
        return await read([session.generate_ids([5] * n, options_for(200, "ar")) for n in (1, 2)])

    order = [stream for stream, piece in asyncio.run(read_both()) if piece is not None]
    assert order not in (sorted(order), sorted(order, reverse=True))


def test_a_failed_pass_is_raised(tiny_bundle):
    session = reciting_session(tiny_bundle, slots=2)

    def fail(kind):
        raise PassError("the pass failed")

    session.backend.run = fail  # type: ignore[method-assign]

    async def read_both():
        return await read([session.generate_ids([5] * n, options_for(9)) for n in (1, 2)])

    with pytest.raises(PassError, match="the pass failed"):
        asyncio.run(read_both())


def test_a_stream_that_was_read_is_refused(tiny_bundle):
    session = reciting_session(tiny_bundle)
    stream = session.generate_ids([5], options_for(3)).result()
    with pytest.raises(PassError, match="read to its end"):
        asyncio.run(read([stream]))


def test_pieces_have_the_time_at_which_they_were_written_and_not_read(tiny_bundle):
    session = reciting_session(tiny_bundle)
    start = time.perf_counter()
    generation = session.generate("The quick", options_for(5, "ar"))
    generation._sequence.ended.wait(20)
    end = time.perf_counter()
    time.sleep(0.05)
    times = [piece.written for piece in generation if piece.tokens]
    assert times == sorted(times) and start < times[0] and times[-1] < end
