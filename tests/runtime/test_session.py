"""Sessions: cancelling, waiting for a slot, several readers, prefix reuse, and refusals."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
from dataclasses import replace

import pytest
from reciting import BOS, EOS, assert_idle, reciting_session, words
from tokenizers import Tokenizer

from pass_runtime import QueueFull
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.sequence import End, SequenceState, Token
from pass_runtime.errors import PassError
from pass_runtime.generation import TokenStream, merged
from pass_runtime.measuring.lossless import first_difference
from pass_runtime.options import MAX_THREADS
from pass_runtime.session import GenerateOptions, load, read_tokenizer

TWO_PASS = GenerateOptions(12, plan="two-pass", ignore_eos=True)
ENDLESS = GenerateOptions(700, plan="two-pass", ignore_eos=True)


@pytest.fixture(scope="module")
def real(tiny_bundle):
    """The tiny model; only requests with `reuse_prefix` reuse what a slot has read."""
    return load(tiny_bundle, "cpu", threads=1, prefix_cache=False)


@pytest.fixture
def stopped(tiny_bundle):
    """(session, go, begun): a pass of its one slot sets `begun` and then waits for `go`."""
    session = reciting_session(tiny_bundle, max_queue=2)
    go, begun, run = threading.Event(), threading.Event(), session.backend.run

    def held(kind):
        begun.set()
        assert go.wait(20)
        return run(kind)

    session.backend.run = held  # type: ignore[method-assign]
    yield session, go, begun
    go.set()
    session.close()


def recited(start: int, count: int) -> list[int]:
    return [words(start + i) for i in range(count)]


def tokens_of(session, prompt, options) -> list[int]:
    return [token for piece in session.generate_ids(prompt, options) for token in piece]


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_cancelled_stream_keeps_what_was_written(tiny_bundle, pieces):
    session = reciting_session(tiny_bundle)
    stream = session.generate_ids([5], ENDLESS)
    for _ in range(pieces):
        next(stream)
    assert len(stream.token_ids) == [1, 8, 9][pieces - 1]
    stream.cancel()
    # What was written before can still be read.
    rest = [token for piece in stream for token in piece]
    assert (stream.finish_reason, stream.stop_reason) == ("cancelled", None)
    assert stream.token_ids[-len(rest) :] == rest or not rest
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


@pytest.mark.parametrize("how", ["iterate", "result"])
def test_a_stream_can_be_read_on_after_a_break(tiny_bundle, how):
    stream = reciting_session(tiny_bundle).generate_ids([5], TWO_PASS)
    for _ in stream:
        break
    assert stream.finish_reason is None
    if how == "result":
        assert stream.result() is stream
    else:
        assert [token for piece in stream for token in piece] == recited(2, 11)
    assert stream.token_ids == recited(1, 12)
    assert stream.finish_reason == "length"


@pytest.mark.parametrize("first", [list, lambda stream: stream.result()], ids=["iterate", "result"])
def test_a_stream_is_read_once(tiny_bundle, first):
    stream = reciting_session(tiny_bundle).generate_ids([5], GenerateOptions(3, plan="ar"))
    first(stream)
    with pytest.raises(PassError, match="read to its end"):
        iter(stream)
    assert stream.token_ids == recited(1, 3)
    assert (stream.finish_reason, stream.done) == ("length", True)
    assert stream.result() is stream  # result() reads nothing after the end


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_interleaved_reading(tiny_bundle, slots):
    session = reciting_session(tiny_bundle, slots=slots)
    streams = [session.generate_ids([5] * (i + 1), TWO_PASS) for i in range(4)]
    found = [list[int]() for _ in streams]
    while not all(stream.finish_reason for stream in streams):
        for stream, tokens in zip(streams, found, strict=True):
            tokens += next(stream, [])
    assert found == [recited(i + 1, 12) for i in range(4)]


def test_a_full_queue_refuses_and_recovers(stopped):
    session, go, begun = stopped
    running = session.generate_ids([5], TWO_PASS)
    assert begun.wait(20)
    waiting = [session.generate_ids([5, 6], TWO_PASS) for _ in range(2)]
    with pytest.raises(QueueFull, match=r"^2 requests are waiting already.*max_queue$"):
        session.generate_ids([5], TWO_PASS)
    go.set()
    assert [stream.result().token_ids for stream in waiting] == [recited(2, 12)] * 2
    assert running.result().token_ids == recited(1, 12)
    assert tokens_of(session, [5], TWO_PASS) == recited(1, 12)


def test_reserved_places_are_taken(stopped):
    """One slot and a queue of two are three places, of which two are reserved."""
    session, go, _ = stopped
    with session.reserve(2):
        first = session.generate_ids([5], TWO_PASS)
        with pytest.raises(QueueFull, match=r"^2 requests are waiting already"):
            session.generate_ids([5, 6], TWO_PASS)
        with pytest.raises(QueueFull), session.reserve(1):
            pytest.fail("there is no place")
        with session.reserve(1, max_queue=3):
            pass
    with pytest.raises(QueueFull):
        session.generate_all([5, 6], [TWO_PASS] * 3)
    others = session.generate_all([5, 6], [TWO_PASS] * 2)
    go.set()
    assert first.result().token_ids == recited(1, 12)
    assert [each.result().token_ids for each in others] == [recited(2, 12)] * 2


def test_begin_uses_the_places_reserved_for_it(stopped):
    session, go, _ = stopped
    with session.reserve(3) as places:
        begun = session.begin([session.request((5,), TWO_PASS) for _ in range(2)], places)
        assert places.count == 1
        with pytest.raises(QueueFull):
            session.generate_ids([5], TWO_PASS)
    begun.append(session.generate_ids([5], TWO_PASS))
    with pytest.raises(QueueFull):
        session.generate_ids([5], TWO_PASS)
    with pytest.raises(QueueFull):
        session.reserve(1)
    go.set()
    assert [each.result().token_ids for each in begun] == [recited(1, 12)] * 3


def test_a_forgotten_reservation_frees_its_places(stopped):
    session, go, _ = stopped
    places = session.reserve(3)
    with pytest.raises(QueueFull):
        session.generate_ids([5], TWO_PASS)
    del places
    assert session.generate_ids([5], TWO_PASS)
    go.set()


def test_a_place_is_free_when_the_end_is_read(tiny_bundle):
    session = reciting_session(tiny_bundle, max_queue=1)
    before = session.generate_ids([5], GenerateOptions(2, plan="ar"))
    for _ in range(300):
        after = session.generate_ids([5], GenerateOptions(2, plan="ar"))
        assert sum(map(len, before)) == 2
        before = after


def test_a_cancelled_request_leaves_the_queue(stopped):
    """Although an older request still waits; a new request gets its place at once."""
    session, go, begun = stopped
    running = session.generate_ids([5], TWO_PASS)
    assert begun.wait(20)
    first, second = (session.generate_ids([5, 6], TWO_PASS) for _ in range(2))
    second.cancel()
    scheduler = session._worker._scheduler
    scheduler._drop_cancelled()
    assert (second.done, first.done) == (True, False)
    third = session.generate_ids([5, 6, 7], TWO_PASS)
    go.set()
    assert second.result().token_ids == [] and second.finish_reason == "cancelled"
    assert first.result().token_ids == recited(2, 12)
    assert third.result().token_ids == recited(3, 12)
    assert running.result().finish_reason == "length"


def test_result_raises_after_its_timeout_and_can_be_called_again(stopped):
    session, go, _ = stopped
    stream = session.generate([5], TWO_PASS)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not ended within 0\.05 seconds"):
        stream.result(timeout=0.05)
    assert time.monotonic() - started < 5
    assert stream.finish_reason is None
    go.set()
    assert stream.result(timeout=20).token_ids == recited(1, 12)


def test_tokens_written_before_a_timeout_are_read(stopped):
    sequence = SequenceState(stopped[0].request([5], TWO_PASS))
    stream = TokenStream(sequence, session=None)
    sequence.write([Token(7, "model")])
    with pytest.raises(TimeoutError):
        stream.result(timeout=0)
    assert stream.token_ids == [7]
    sequence.write([Token(8, "model")])
    sequence.finish(End("length"))
    assert stream.result(timeout=0).token_ids == [7, 8]


def start_reader(stream: TokenStream, reader: str) -> tuple[threading.Thread, list[int]]:
    """Start a thread that iterates the stream, in a task or not. Return it and what it reads."""
    found: list[int] = []

    async def read() -> None:
        async for piece in stream:
            found.extend(piece)

    def iterate() -> None:
        for piece in stream:
            found.extend(piece)

    thread = threading.Thread(target=iterate if reader == "thread" else lambda: asyncio.run(read()))
    thread.start()
    return thread, found


async def first_of(items):
    return await anext(aiter(items))


@pytest.mark.parametrize("first", ["thread", "task"])
def test_a_second_reader_is_refused_and_the_first_gets_everything(stopped, first):
    """Otherwise each would wait for ever for what the other one took."""
    session, go, begun = stopped
    stream = session.generate_ids([5], TWO_PASS)
    thread, found = start_reader(stream, first)
    assert begun.wait(20)
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
    go.set()
    thread.join(20)
    assert not thread.is_alive() and found == recited(1, 12) == stream.token_ids
    assert stream.result().finish_reason == "length"


@pytest.mark.parametrize("reader", ["thread", "task"])
def test_waiting_for_the_end_beside_a_reader(tiny_bundle, reader):
    """Both see the end, whichever reads it; every token is read once, in order."""
    session = reciting_session(tiny_bundle)
    for _ in range(20):
        stream = session.generate_ids([5], GenerateOptions(60, plan="ar", ignore_eos=True))
        thread, found = start_reader(stream, reader)
        while not (found or stream._reader_lock.locked()) and thread.is_alive():
            time.sleep(0.0001)
        stream.result(timeout=60)
        thread.join(20)
        assert not thread.is_alive()
        assert stream.token_ids == recited(1, 60) and found == stream.token_ids[: len(found)]


def test_result_waits_for_the_end_and_not_for_events(stopped):
    class Unwatched(queue.SimpleQueue):
        def get(self, *_: object, **__: object):
            raise AssertionError("waited for an event")

    session, go, _ = stopped
    stream = session.generate([5], TWO_PASS)
    stream._sequence.events = Unwatched()
    go.set()
    assert stream.result().token_ids == recited(1, 12)


def test_two_generations_in_one_event_loop(tiny_bundle):
    session, order = reciting_session(tiny_bundle, slots=2), []

    async def read(name: int):
        stream = session.generate_ids([5] * name, GenerateOptions(200, plan="ar", ignore_eos=True))
        async for piece in stream:
            order.append(name)
            assert len(piece) == 1
        return stream

    async def both():
        return await asyncio.gather(read(1), read(2))

    streams = asyncio.run(both())
    assert [stream.token_ids for stream in streams] == [recited(1, 200), recited(2, 200)]
    assert 1 in order[:399][order.index(2) :], "one of them was read to its end before the other"

    with pytest.raises(PassError, match="read to its end"):
        asyncio.run(first_of(streams[0]))


def test_a_closed_session_refuses(tiny_bundle):
    session = reciting_session(tiny_bundle)
    stream = session.generate_ids([5], ENDLESS)
    next(stream)
    session.close()
    session.close()
    assert stream.result().finish_reason == "cancelled"
    assert stream.token_ids == recited(1, len(stream.token_ids))
    for call in (lambda: session.generate("x"), lambda: session.tuner(SamplingParams())):
        with pytest.raises(PassError, match=r"^this session is closed; load the bundle again$"):
            call()
    assert_idle(session)


def test_closing_from_the_decoding_thread_waits_for_its_pass(tiny_bundle):
    """Garbage collection may close a session on any thread, even while a pass uses the backend."""
    session, events = reciting_session(tiny_bundle), []
    run, close = session.backend.run, session.backend.close

    def closing(kind):
        session.close()
        events.append("pass")
        return run(kind)

    session.backend.run = closing  # type: ignore[method-assign]
    session._finalizer.detach()
    session._finalizer = lambda: session._worker.close(lambda: (events.append("closed"), close()))  # type: ignore
    stream = session.generate_ids([5], ENDLESS)
    assert stream.result().finish_reason == "cancelled"
    assert_idle(session)
    assert events == ["pass", "closed"]


def check_reuse(session, prompt: list[int], options: GenerateOptions, cached: int) -> None:
    """`reuse_prefix` reuses `cached` tokens and changes no token of the text."""
    reused = session.generate_ids(prompt, replace(options, reuse_prefix=True)).result()
    fresh = session.generate_ids(prompt, options).result()
    assert (reused.stats.cached_tokens, fresh.stats.cached_tokens) == (cached, 0)
    difference = first_difference(session, prompt, options, reused.token_ids, fresh.token_ids)
    assert difference is None or difference.is_near_tie, difference


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("plan", ["ar", "two-pass"])
@pytest.mark.parametrize("kept", [0, 1, 7, 19])
def test_prefix_reuse_changes_no_token(real, plan, temperature, kept):
    """A second turn: the first prompt, `kept` of its answer's 20 tokens, then something new."""
    prompt = list(range(20, 60))
    options = GenerateOptions(20, SamplingParams(temperature, seed=9), plan=plan, ignore_eos=True)
    answer = tokens_of(real, prompt, options)
    other = next(token for token in (100, 101) if token != answer[kept])
    turn = [*prompt, *answer[:kept], other, 102, 103]
    check_reuse(real, turn, options, cached=(len(prompt) + kept) // 16 * 16)


def test_prefix_reuse_never_counts_the_root(real):
    """The last prompt token must run to predict the next, so only blocks before it are reused."""
    prompt = list(range(20, 68))
    options = GenerateOptions(5, plan="ar", reuse_prefix=True, ignore_eos=True)
    tokens_of(real, [2], GenerateOptions(1))  # forget what other tests left
    streams = [real.generate_ids(prompt, options).result() for _ in range(2)]
    assert [stream.stats.cached_tokens for stream in streams] == [0, 32]
    assert streams[0].token_ids == streams[1].token_ids


def test_prefix_reuse_after_an_early_end_and_with_another_plan(real):
    """K/V of rejected drafts and look-ahead rows must not be reused."""
    prompt = list(range(20, 60))
    running = real.generate_ids(prompt, GenerateOptions(700, plan="two-pass", ignore_eos=True))
    next(running)
    next(running)
    running.cancel()
    assert running.result().finish_reason == "cancelled"
    options = GenerateOptions(15, plan="ar", ignore_eos=True)
    check_reuse(real, [*prompt[:35], 200, 201], options, cached=32)


def test_prefix_reuse_finds_the_slot_that_holds_it(tiny_bundle):
    """While another request decodes and a third slot is empty."""
    session = load(tiny_bundle, "cpu", threads=1, max_batch_size=3)
    beside, prompt = session.generate_ids([5], ENDLESS), list(range(20, 53))
    next(beside)
    options = GenerateOptions(8, plan="two-pass", ignore_eos=True)
    first = session.generate_ids(prompt, options).result()
    second = session.generate_ids(prompt, replace(options, reuse_prefix=True)).result()
    assert not beside.done, "the tiny model has become quicker than this test"
    assert (first.stats.cached_tokens, second.stats.cached_tokens) == (0, 32)
    assert second.token_ids == first.token_ids


def test_an_empty_prompt_is_the_start_token(tiny_bundle):
    session = reciting_session(tiny_bundle)
    assert session.encode("") == [BOS]
    assert session.generate("", TWO_PASS).result().token_ids == recited(1, 12)
    model = session.manifest.model.model_copy(update={"bos_token_id": None})
    session.manifest = session.manifest.model_copy(update={"model": model})
    assert session.encode("") == [EOS]
    model = model.model_copy(update={"eos_token_ids": ()})
    session.manifest = session.manifest.model_copy(update={"model": model})
    with pytest.raises(PassError, match="no start token"):
        session.encode("")


def test_a_tokenizer_of_an_older_export_neither_cuts_nor_pads(tiny_bundle, tmp_path):
    tokenizer = Tokenizer.from_file(str(tiny_bundle / "tokenizer.json"))
    text = "The quick brown fox jumps over the lazy dog."
    expected = tokenizer.encode(text).ids
    for enable in (
        lambda: tokenizer.enable_truncation(4),
        lambda: tokenizer.enable_padding(length=64),
    ):
        enable()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids != expected
        assert read_tokenizer(tmp_path).encode(text).ids == expected


@pytest.mark.parametrize("prompt", [[], [-1], [320], [5, 326]])
def test_prompts_that_are_not_tokens_are_refused(tiny_bundle, prompt):
    """326 would be a look-ahead row of the trunk: never a prompt token."""
    with pytest.raises(PassError):
        reciting_session(tiny_bundle).generate_ids(prompt)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        *(
            ("threads", wrong, rf"must be 0 .* to {MAX_THREADS}, not {wrong}$")
            for wrong in (-1, MAX_THREADS + 1, 10**6)
        ),
        *(("max_batch_size", wrong, "") for wrong in (0, 1025)),
        ("max_queue", 0, ""),
        *(("capacity", wrong, "") for wrong in (0, 6, 772)),
        ("speculative_max_concurrency", -1, ""),
    ],
)
def test_sizes_out_of_range_are_refused(tiny_bundle, name, wrong, message):
    with pytest.raises(PassError, match=f"^{name.replace('_', '-')} {message}"):
        load(tiny_bundle, "cpu", **{name: wrong})


def test_a_capacity_bounds_the_longest_sequence(tiny_bundle):
    with load(tiny_bundle, "cpu", threads=1, capacity=16) as session:
        stream = session.generate_ids([5] * 10, ENDLESS).result()
        assert (len(stream.token_ids), stream.finish_reason) == (7, "length")
        with pytest.raises(PassError, match=r"17 tokens.* 16"):
            session.generate_ids([5] * 17)
