from __future__ import annotations

import pytest
import reciting
from reciting import BOS, ENDLESS, EOS, TWO_PASS, assert_idle, recited, reciting_session, tokens_of
from tokenizers import Tokenizer

from pass_runtime import QueueFull
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.options import MAX_THREADS
from pass_runtime.session import GenerateOptions, load, read_tokenizer

held = reciting.held


def test_a_full_queue_refuses_requests_until_some_have_begun(held):
    session = held.session
    running = session.generate_ids([5], TWO_PASS)
    assert held.begun.wait(20)
    waiting = [session.generate_ids([5, 6], TWO_PASS) for _ in range(2)]
    with pytest.raises(QueueFull, match=r"^2 requests are waiting already.*max_queue$"):
        session.generate_ids([5], TWO_PASS)
    held.go.set()
    assert [stream.result().token_ids for stream in waiting] == [recited(2, 12)] * 2
    assert running.result().token_ids == recited(1, 12)
    assert tokens_of(session, [5], TWO_PASS) == recited(1, 12)


def test_reserved_places_are_taken(held):
    session = held.session
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
    forgotten = session.reserve(2)
    with pytest.raises(QueueFull):
        session.generate_ids([5], TWO_PASS)
    del forgotten
    others = session.generate_all([5, 6], [TWO_PASS] * 2)
    held.go.set()
    assert first.result().token_ids == recited(1, 12)
    assert [each.result().token_ids for each in others] == [recited(2, 12)] * 2


def test_begin_uses_the_places_reserved_for_it(held):
    session = held.session
    with session.reserve(3) as places:
        streams = session.begin([session.request((5,), TWO_PASS) for _ in range(2)], places)
        assert places.count == 1
        with pytest.raises(QueueFull):
            session.generate_ids([5], TWO_PASS)
    streams.append(session.generate_ids([5], TWO_PASS))
    with pytest.raises(QueueFull):
        session.generate_ids([5], TWO_PASS)
    with pytest.raises(QueueFull):
        session.reserve(1)
    held.go.set()
    assert [stream.result().token_ids for stream in streams] == [recited(1, 12)] * 3


def test_a_place_is_free_when_the_end_is_read(tiny_bundle):
    session = reciting_session(tiny_bundle, max_queue=1)
    running = session.generate_ids([5], GenerateOptions(2, plan="ar"))
    for _ in range(300):
        waiting = session.generate_ids([5], GenerateOptions(2, plan="ar"))
        assert sum(map(len, running)) == 2
        running = waiting


def test_a_cancelled_request_leaves_the_queue(held):
    """Its place is free at once, even while an older request still waits."""
    session = held.session
    running = session.generate_ids([5], TWO_PASS)
    assert held.begun.wait(20)
    first, second = (session.generate_ids([5, 6], TWO_PASS) for _ in range(2))
    second.cancel()
    session._engine._end_cancelled()
    assert (second.done, first.done) == (True, False)
    third = session.generate_ids([5, 6, 7], TWO_PASS)
    held.go.set()
    assert second.result().token_ids == [] and second.finish_reason == "cancelled"
    assert first.result().token_ids == recited(2, 12)
    assert third.result().token_ids == recited(3, 12)
    assert running.result().finish_reason == "length"


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

    def close_and_run(kind):
        session.close()
        events.append("pass")
        return run(kind)

    def close_backend() -> None:
        events.append("closed")
        close()

    session.backend.run = close_and_run  # type: ignore[method-assign]
    session._finalizer.detach()
    session._finalizer = lambda: session._worker.close(close_backend)  # type: ignore[assignment]
    stream = session.generate_ids([5], ENDLESS)
    assert stream.result().finish_reason == "cancelled"
    assert_idle(session)
    assert events == ["pass", "closed"]


def test_an_empty_prompt_is_the_start_token_or_else_the_end_token(tiny_bundle):
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
def test_empty_prompts_and_ids_beyond_the_vocabulary_are_refused(tiny_bundle, prompt):
    """From 320, the size of the vocabulary, on, the trunk's ids are those of look-ahead rows."""
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
        # valid: multiples of 4 up to the model's 768 positions
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
