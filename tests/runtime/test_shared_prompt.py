"""Several texts behind one prompt: it is read once, and each text is what it would be alone."""

from __future__ import annotations

import pytest
from reciting import assert_idle, reciting_session, runner_of

from pass_runtime import GenerateOptions, QueueFull, SamplingParams
from pass_runtime.session import load

PROMPT = list(range(20, 130))  # more than a chunk
OTHER = GenerateOptions(700, plan="two-pass", ignore_eos=True)


def asked(n: int, plan: str = "two-pass", new: int = 12) -> list[GenerateOptions]:
    sampled = (SamplingParams(0.9, seed=7 + i) for i in range(n))
    return [GenerateOptions(new, each, plan=plan, ignore_eos=True) for each in sampled]


@pytest.fixture(scope="module")
def alone(tiny_bundle):
    """The tokens of each text, decoded alone."""
    with load(tiny_bundle, "cpu", threads=1) as session:
        return [session.generate(PROMPT, options).result().token_ids for options in asked(5)]


def watched(bundle, slots: int):
    """A session, and a list to which it appends the (slot, number of tokens) of every chunk."""
    session = load(bundle, "cpu", threads=1, max_batch_size=slots)
    chunks, prefill = [], session.backend.prefill

    def counted(slot, length, tokens, width):
        chunks.append((slot, len(tokens)))
        prefill(slot, length, tokens, width)

    session.backend.prefill = counted  # type: ignore[method-assign]
    return session, chunks


@pytest.mark.parametrize(
    ("slots", "plan"), [(1, "two-pass"), (2, "ar"), (4, "fused"), (8, "two-pass")]
)
def test_one_prompt_is_read_once(tiny_bundle, alone, slots, plan):
    """Also with fewer slots than texts: later ones copy the prompt from a slot, free or in use."""
    session, chunks = watched(tiny_bundle, slots)
    with session:
        found = [each.result() for each in session.generate_all(PROMPT, asked(5, plan))]
        assert [each.token_ids for each in found] == alone
        assert sum(count for _, count in chunks) == len(PROMPT) - 1
        assert sorted(each.stats.cached_tokens for each in found) == [0] + [len(PROMPT) - 1] * 4
        assert_idle(session)


def test_a_shared_prompt_is_read_while_others_decode(tiny_bundle, alone):
    """While another request decodes, the prompt is read in chunks, a long prompt between them."""
    session, chunks = watched(tiny_bundle, 4)
    with session:
        beside = session.generate([5, 6, 7], OTHER)
        next(beside)
        first = session.generate_all(PROMPT, asked(2))
        other = session.generate(PROMPT, asked(1)[0])
        second = session.generate_all(PROMPT[:-1], asked(2))
        assert [each.result().token_ids for each in first] == alone[:2]
        assert other.result().token_ids == alone[0]
        assert len({tuple(each.result().token_ids) for each in second}) == 2
        assert not beside.done, "the tiny model has become quicker than this test"
        beside.cancel()
        # Of the other two prompts only the tokens after the last whole block are read.
        assert sum(count for _, count in chunks) == 2 + len(PROMPT) - 1 + (109 - 96) + (108 - 96)


@pytest.mark.parametrize("chunk", [1, 2])
def test_the_request_that_reads_the_prompt_is_cancelled(tiny_bundle, alone, chunk):
    """After its first chunk or its second: the next request reads the rest."""
    session, chunks = watched(tiny_bundle, 3)
    with session:
        beside = session.generate([3, 4], OTHER)  # so that the prompt is read in chunks
        next(beside)
        prefill, count = session.backend.prefill, []

        def cancelling(slot, *arguments):
            count.append(slot)
            if len(count) == chunk:
                runner_of(session).slots[slot].sequence.cancelled = True
            prefill(slot, *arguments)

        session.backend.prefill = cancelling  # type: ignore[method-assign]
        first, *others = session.generate_all(PROMPT, asked(3))
        assert [each.result().token_ids for each in others] == alone[1:3]
        assert first.result().finish_reason == "cancelled"
        assert len(PROMPT) - 1 < sum(number for _, number in chunks) < 2 * (len(PROMPT) - 1)
        beside.cancel()


def test_a_failed_read_of_the_prompt_fails_its_request_only(tiny_bundle, alone):
    session, _ = watched(tiny_bundle, 3)
    with session:
        prefill, failures = session.backend.prefill, [RuntimeError("broken")]

        def broken(*arguments):
            if failures:
                raise failures.pop()
            prefill(*arguments)

        session.backend.prefill = broken  # type: ignore[method-assign]
        first, *others = session.generate_all(PROMPT, asked(3))
        with pytest.raises(RuntimeError, match="broken"):
            first.result()
        assert [each.result().token_ids for each in others] == alone[1:3]


def test_either_all_texts_are_queued_or_none(tiny_bundle):
    session = reciting_session(tiny_bundle, max_queue=2)
    beside = session.generate([5], OTHER)
    next(beside)
    with pytest.raises(QueueFull):
        session.generate_all([5], asked(3))
    beside.cancel()
    beside.result()
    assert session.generate([5], asked(1)[0]).result(20).finish_reason == "length"
    assert_idle(session)
