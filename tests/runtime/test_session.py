"""One sequence at a time: early ends, a newer request taking over, prefix reuse, and refusals."""

from __future__ import annotations

import pytest
from reciting import BOS, reciting_session, words

from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.errors import PassError
from pass_runtime.session import GenerateOptions, load
from pass_runtime.testing.lossless import first_difference

TWO_PASS = GenerateOptions(12, plan="two-pass", ignore_eos=True)


@pytest.fixture(scope="module")
def real(tiny_bundle):
    """The real tiny model."""
    return load(tiny_bundle, "cpu", threads=1)


def tokens_of(session, prompt, options) -> list[int]:
    return [token for piece in session.generate_ids(prompt, options) for token in piece]


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_closing_early(tiny_bundle, pieces):
    session = reciting_session(tiny_bundle)
    stream = session.generate_ids([5], TWO_PASS)
    running = iter(stream)
    for _ in range(pieces):
        next(running)
    running.close()
    assert (stream.finish_reason, stream.stop_reason) == ("cancelled", None)
    assert len(stream.token_ids) == [1, 8, 9][pieces - 1]
    assert tokens_of(session, [5], TWO_PASS) == [words(1 + i) for i in range(12)]


def test_closing_a_text_early(tiny_bundle):
    session = reciting_session(tiny_bundle)
    generation = session.generate([5], TWO_PASS)
    running = iter(generation)
    next(running)
    running.close()
    assert generation.finish_reason == "cancelled"
    assert len(generation.token_ids) == 1
    assert len(session.generate([5], TWO_PASS).run().token_ids) == 12


def test_leaving_a_for_loop_with_an_exception(tiny_bundle):
    session = reciting_session(tiny_bundle)
    stream = session.generate_ids([5], TWO_PASS)
    with pytest.raises(KeyError):
        for _ in stream:
            raise KeyError
    assert stream.finish_reason == "cancelled"


def test_a_newer_request_ends_an_older_one(tiny_bundle):
    session = reciting_session(tiny_bundle)
    older = session.generate_ids([5], TWO_PASS)
    running = iter(older)
    next(running)
    newer = iter(session.generate_ids([6, 7], TWO_PASS))
    first = next(newer)
    with pytest.raises(PassError, match="ended by a newer one"):
        next(running)
    assert older.finish_reason == "cancelled"
    # The newer one never notices.
    assert first + [token for piece in newer for token in piece] == [words(2 + i) for i in range(12)]


def test_a_request_that_was_never_run_takes_nothing_over(tiny_bundle):
    session = reciting_session(tiny_bundle)
    running = iter(session.generate_ids([5], TWO_PASS))
    got = next(running)
    session.generate_ids([6, 7], TWO_PASS)
    assert got + [token for piece in running for token in piece] == [words(1 + i) for i in range(12)]


def test_a_finished_stream_yields_nothing_more(tiny_bundle):
    stream = reciting_session(tiny_bundle).generate_ids([5], GenerateOptions(3, plan="ar"))
    assert [token for piece in stream for token in piece] == [words(1), words(2), words(3)]
    assert list(stream) == []
    assert stream.token_ids == [words(1), words(2), words(3)]
    assert stream.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("plan", ["ar", "two-pass"])
@pytest.mark.parametrize("kept", [0, 1, 7, 19])
def test_prefix_reuse_changes_no_token(real, plan, temperature, kept):
    """A second turn: the first prompt, `kept` of its answer's 20 tokens, then something new."""
    prompt = list(range(20, 60))
    first = GenerateOptions(20, SamplingParams(temperature, seed=9), plan=plan, ignore_eos=True)
    answer = tokens_of(real, prompt, first)
    other = next(token for token in (100, 101) if token != answer[kept])
    turn = [*prompt, *answer[:kept], other, 102, 103]
    reusing = GenerateOptions(20, first.sampling, plan=plan, ignore_eos=True, reuse_prefix=True)
    stream = real.generate_ids(turn, reusing)
    reused = [token for piece in stream for token in piece]
    assert stream.stats.cached_tokens == len(prompt) + kept
    plain = real.generate_ids(turn, GenerateOptions(20, first.sampling, plan=plan, ignore_eos=True))
    fresh = [token for piece in plain for token in piece]
    assert plain.stats.cached_tokens == 0
    difference = first_difference(real, turn, reusing, reused, fresh)
    assert difference is None or difference.is_near_tie, difference


def test_prefix_reuse_never_counts_the_root(real):
    """The last prompt token must run, to say what follows it: an equal prompt reuses all but one."""
    prompt = list(range(20, 60))
    options = GenerateOptions(5, plan="ar", reuse_prefix=True, ignore_eos=True)
    tokens_of(real, [2], GenerateOptions(1))  # forget what other tests left
    streams = [real.generate_ids(prompt, options) for _ in range(2)]
    answers = [[token for piece in stream for token in piece] for stream in streams]
    assert [stream.stats.cached_tokens for stream in streams] == [0, 39]
    assert answers[0] == answers[1]


def test_prefix_reuse_after_an_early_close_and_with_another_plan(real):
    """Rejected drafts and look-ahead rows left K/V behind the committed entries; none of it may be seen."""
    prompt = list(range(20, 60))
    running = iter(real.generate_ids(prompt, GenerateOptions(30, plan="two-pass", ignore_eos=True)))
    next(running)
    next(running)
    running.close()
    options = GenerateOptions(15, plan="ar", reuse_prefix=True, ignore_eos=True)
    stream = real.generate_ids([*prompt[:35], 200, 201], options)
    reused = [token for piece in stream for token in piece]
    assert stream.stats.cached_tokens == 35
    fresh = tokens_of(real, [*prompt[:35], 200, 201], GenerateOptions(15, plan="ar", ignore_eos=True))
    difference = first_difference(real, [*prompt[:35], 200, 201], options, reused, fresh)
    assert difference is None or difference.is_near_tie, difference


def test_an_empty_prompt_is_the_start_token(tiny_bundle):
    session = reciting_session(tiny_bundle)
    assert session.encode("") == [BOS]
    assert session.generate("", TWO_PASS).run().token_ids == [words(1 + i) for i in range(12)]


def test_an_empty_prompt_of_a_model_without_bos(tiny_bundle):
    session = reciting_session(tiny_bundle)
    model = session.manifest.model
    for change, expected in (({"bos_token_id": None}, [1]), ({"bos_token_id": None, "eos_token_ids": ()}, None)):
        session.manifest = session.manifest.model_copy(update={"model": model.model_copy(update=change)})
        if expected:
            assert session.encode("") == expected
        else:
            with pytest.raises(PassError, match="no start token"):
                session.encode("")


@pytest.mark.parametrize("prompt", [[], [-1], [320], [5, 326]])
def test_prompts_that_are_not_tokens_are_refused(tiny_bundle, prompt):
    """326 would be a look-ahead row of the trunk: never a prompt token."""
    with pytest.raises(PassError):
        reciting_session(tiny_bundle).generate_ids(prompt)


def test_options_are_refused_by_name():
    with pytest.raises(PassError, match="max-new-tokens"):
        GenerateOptions(0)
    with pytest.raises(PassError, match="unknown plan 'fast'"):
        GenerateOptions(plan="fast")


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top-k"),
        ({"top_k": 1025}, "top-k"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.01}, "top-p"),
        ({"top_p": float("nan")}, "top-p"),
        ({"min_p": -0.01}, "min-p"),
        ({"min_p": 1.01}, "min-p"),
        ({"min_p": float("nan")}, "min-p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(wrong, name):
    with pytest.raises(PassError, match=f"^{name} must be"):
        SamplingParams(**wrong)


def test_stop_strings_need_text(tiny_bundle):
    with pytest.raises(PassError, match="stop strings need text"):
        reciting_session(tiny_bundle).generate_ids([5], GenerateOptions(stop=("x",)))
