from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
from contextlib import aclosing

import pytest
import reciting
from hypothesis import given, settings
from hypothesis import strategies as st
from reciting import ENDLESS, TWO_PASS, assert_idle, recited, reciting_session, tokens_of

from pass_runtime.decode.sequence import End, SequenceState, Token
from pass_runtime.errors import PassError
from pass_runtime.generation import TokenStream, merged
from pass_runtime.session import GenerateOptions

held = reciting.held


@pytest.mark.parametrize(("pieces", "tokens"), [(1, 1), (2, 8), (3, 9)])
def test_a_cancelled_stream_keeps_what_was_written(tiny_bundle, pieces, tokens):
    session = reciting_session(tiny_bundle)
    stream = session.generate_ids([5], ENDLESS)
    for _ in range(pieces):
        next(stream)
    assert len(stream.token_ids) == tokens
    stream.cancel()
    # What was written before can still be read.
    rest = [token for piece in stream for token in piece]
    assert (stream.finish_reason, stream.stop_reason) == ("cancelled", None)
    assert stream.token_ids[tokens:] == rest
    assert stream.token_ids == recited(1, len(stream.token_ids))
    assert len(stream.token_ids) < 700
    assert tokens_of(session, [5], TWO_PASS) == recited(1, 12)


@pytest.mark.slow
def test_dropping_the_last_reference_cancels(tiny_bundle):
    session = reciting_session(tiny_bundle)
    stream = session.generate_ids([5], ENDLESS)
    next(stream)
    sequence = stream._sequence
    del stream
    gc.collect()
    assert_idle(session)
    assert sequence.finished is not None and sequence.finished.reason == "cancelled"
    assert tokens_of(session, [5], TWO_PASS) == recited(1, 12)


@pytest.mark.parametrize("read_by", ["iterate", "result"])
def test_a_stream_can_be_read_on_after_a_break(tiny_bundle, read_by):
    stream = reciting_session(tiny_bundle).generate_ids([5], TWO_PASS)
    for _ in stream:
        break
    assert stream.finish_reason is None
    if read_by == "result":
        assert stream.result() is stream
    else:
        assert [token for piece in stream for token in piece] == recited(2, 11)
    assert stream.token_ids == recited(1, 12)
    assert stream.finish_reason == "length"


@pytest.mark.parametrize("read", [list, lambda stream: stream.result()], ids=["iterate", "result"])
def test_a_stream_that_was_read_is_not_iterated_again(tiny_bundle, read):
    stream = reciting_session(tiny_bundle).generate_ids([5], GenerateOptions(3, plan="ar"))
    read(stream)
    with pytest.raises(PassError, match="read to its end"):
        iter(stream)
    assert stream.token_ids == recited(1, 3)
    assert (stream.finish_reason, stream.done) == ("length", True)
    assert stream.result() is stream  # result() reads nothing after the end


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_streams_may_be_read_piece_by_piece_in_turns(tiny_bundle, slots):
    session = reciting_session(tiny_bundle, slots=slots)
    streams = [session.generate_ids([5] * (i + 1), TWO_PASS) for i in range(4)]
    texts = [list[int]() for _ in streams]
    while not all(stream.finish_reason for stream in streams):
        for stream, tokens in zip(streams, texts, strict=True):
            tokens += next(stream, [])
    assert texts == [recited(i + 1, 12) for i in range(4)]


def test_result_raises_after_its_timeout_and_can_be_called_again(held):
    stream = held.session.generate([5], TWO_PASS)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not ended within 0\.05 seconds"):
        stream.result(timeout=0.05)
    assert time.monotonic() - started < 5
    assert stream.finish_reason is None
    held.go.set()
    assert stream.result(timeout=20).token_ids == recited(1, 12)


def test_tokens_written_before_a_timeout_are_read(tiny_bundle):
    sequence = SequenceState(reciting_session(tiny_bundle).request([5], TWO_PASS))
    stream = TokenStream(sequence, session=None)
    sequence.write([Token(7, "model")])
    with pytest.raises(TimeoutError):
        stream.result(timeout=0)
    assert stream.token_ids == [7]
    sequence.write([Token(8, "model")])
    sequence.finish(End("length"))
    assert stream.result(timeout=0).token_ids == [7, 8]


def start_reader(stream: TokenStream, reader: str) -> tuple[threading.Thread, list[int]]:
    tokens: list[int] = []

    async def read() -> None:
        async for piece in stream:
            tokens.extend(piece)

    def iterate() -> None:
        for piece in stream:
            tokens.extend(piece)

    thread = threading.Thread(target=iterate if reader == "thread" else lambda: asyncio.run(read()))
    thread.start()
    return thread, tokens


async def first_of(items):
    return await anext(aiter(items))


@pytest.mark.parametrize("first", ["thread", "task"])
def test_a_second_reader_is_refused_and_the_first_gets_everything(held, first):
    """If both read, each would miss the pieces that the other one took."""
    stream = held.session.generate_ids([5], TWO_PASS)
    thread, tokens = start_reader(stream, first)
    assert held.begun.wait(20)
    while not stream._reader_lock.locked():
        time.sleep(0.001)
    for read in (
        lambda: next(stream),
        lambda: asyncio.run(first_of(stream)),
        lambda: asyncio.run(first_of(merged([stream]))),
    ):
        with pytest.raises(PassError, match="another thread or task is reading this generation"):
            read()
    with pytest.raises(TimeoutError):
        stream.result(timeout=0)
    held.go.set()
    thread.join(20)
    assert not thread.is_alive() and tokens == recited(1, 12) == stream.token_ids
    assert stream.result().finish_reason == "length"


@pytest.mark.parametrize("reader", ["thread", "task"])
def test_result_and_a_reader_in_another_thread_both_see_the_end(tiny_bundle, reader):
    session = reciting_session(tiny_bundle)
    for _ in range(20):
        stream = session.generate_ids([5], GenerateOptions(60, plan="ar", ignore_eos=True))
        thread, tokens = start_reader(stream, reader)
        while not (tokens or stream._reader_lock.locked()) and thread.is_alive():
            time.sleep(0.0001)
        stream.result(timeout=60)
        thread.join(20)
        assert not thread.is_alive()
        assert stream.token_ids == recited(1, 60) and tokens == stream.token_ids[: len(tokens)]


def test_result_waits_for_the_end_and_not_for_events(held):
    """Waiting for every event would wake its thread once for every pass."""

    class UnwaitedQueue(queue.SimpleQueue):
        def get(self, *_: object, **__: object):
            raise AssertionError("waited for an event")

    stream = held.session.generate([5], TWO_PASS)
    stream._sequence.events = UnwaitedQueue()
    held.go.set()
    assert stream.result().token_ids == recited(1, 12)


def read_merged(streams: list[TokenStream]) -> list[tuple[int, list[int] | None]]:
    """Return all (index of the stream, piece, or None at its end)."""

    async def read():
        async with aclosing(merged(streams)) as items:
            return [item async for item in items]

    return asyncio.run(read())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=5), st.integers(1, 3))
def test_merged_streams_have_every_piece_of_each_in_order(tiny_bundle, lengths, slots):
    session = reciting_session(tiny_bundle, slots=slots)
    options = [GenerateOptions(length, plan="two-pass", ignore_eos=True) for length in lengths]
    items = read_merged([session.generate_ids([5] * (i + 1), o) for i, o in enumerate(options)])
    for index, length in enumerate(lengths):
        *pieces, end = [piece for stream, piece in items if stream == index]
        assert end is None
        assert [token for piece in pieces for token in piece] == recited(index + 1, length)
    assert {stream for stream, _ in items} == set(range(len(lengths)))
    assert_idle(session)


def test_pieces_of_merged_streams_alternate(tiny_bundle):
    session = reciting_session(tiny_bundle, slots=2)
    options = GenerateOptions(200, plan="ar", ignore_eos=True)
    items = read_merged([session.generate_ids([5] * n, options) for n in (1, 2)])
    order = [stream for stream, piece in items if piece is not None]
    assert order not in (sorted(order), sorted(order, reverse=True))


def test_merged_streams_raise_what_ended_one(tiny_bundle):
    def fail(kind):
        raise PassError("the pass failed")

    session = reciting_session(tiny_bundle, slots=2)
    ended = session.generate_ids([5], TWO_PASS).result()
    session.backend.run = fail  # type: ignore[method-assign]
    for streams, message in (
        ([session.generate_ids([5] * n, TWO_PASS) for n in (1, 2)], "the pass failed"),
        ([ended], "read to its end"),
    ):
        with pytest.raises(PassError, match=message):
            read_merged(streams)


def test_pieces_have_the_time_at_which_they_were_written_and_not_read(tiny_bundle):
    session = reciting_session(tiny_bundle)
    start = time.perf_counter()
    generation = session.generate("The quick", GenerateOptions(5, plan="ar", ignore_eos=True))
    generation._sequence.ended.wait(20)
    end = time.perf_counter()
    time.sleep(0.05)
    times = [piece.written for piece in generation if piece.tokens]
    assert times == sorted(times) and start < times[0] and times[-1] < end
