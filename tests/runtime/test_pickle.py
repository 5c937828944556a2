from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from faulty import FaultyBackend, Fuse, session_of

from pass_runtime import (
    REQUEST_OPTIONS,
    Constraint,
    ConstraintStopped,
    Detokenizer,
    GenerateOptions,
    Generation,
    LoadOptions,
    PassError,
    QueueFull,
    SamplingParams,
    Session,
    TooManyConstraints,
    load,
)

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "the oldest protocol": lambda value: pickle.loads(pickle.dumps(value, 0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
PROMPT = [5, 6, 7, 8, 5, 6]
SAMPLED = SamplingParams(0.9, 30, 0.9, seed=3, repetition_penalty=1.2, logit_bias={7: 1.5})
OPTIONS = {
    "plain": GenerateOptions(6, plan="ar"),
    "auto": GenerateOptions(6),
    "logprobs": GenerateOptions(6, SAMPLED, plan="fused", logprobs=2, prompt_logprobs=1),
    "constraint": GenerateOptions(6, constraint=Constraint(regex="[a-z ]{3,}")),
    "bad words": GenerateOptions(6, bad_words=["a", "the"], min_tokens=2, cache_salt="salt"),
    "stop token": GenerateOptions(300, stop_token_ids=range(2, 320)),
}


@pytest.fixture(scope="module")
def session(random_bundle: Path) -> Iterator[Session]:
    with load(random_bundle, "cpu", threads=1) as opened:
        yield opened


@pytest.fixture(params=COPIES)
def copied(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return COPIES[request.param]


def assert_same_result(made: Generation, result: Generation) -> None:
    assert type(made) is type(result) and made is not result
    assert made.as_dict() == result.as_dict()
    assert made.done
    for name in ("tokens", "stats", "submitted", "finish_reason", "stop_reason", "prompt_logprobs"):
        assert getattr(made, name) == getattr(result, name), name
    assert made.result() is made
    with pytest.raises(PassError, match="read to its end already"):
        next(iter(made))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_copy_of_a_result_has_all_of_it(session, copied, options):
    result = session.generate(PROMPT, options).result()
    assert_same_result(copied(result), result)
    assert_same_result(copied(copied(result)), result)
    stream = session.generate_ids(PROMPT, options).result()
    assert_same_result(copied(stream), stream)


def test_a_running_request_is_not_copied(session: Session, copied: Callable[[Any], Any]):
    running = session.generate(PROMPT, GenerateOptions(700, ignore_eos=True))
    with pytest.raises(PassError, match=r"^a generation can be .* call result\(\) first$"):
        copied(running)
    next(running)
    running.cancel()
    result = running.result()
    assert result.finish_reason == "cancelled" and 0 < len(result.tokens) < 700
    assert_same_result(copied(result), result)


def test_a_failed_request_still_fails_as_a_copy(random_bundle: Path, copied: Callable[[Any], Any]):
    backend = FaultyBackend(random_bundle)
    backend.fuses = {"run_trunk": Fuse(MemoryError(), at=1)}
    with session_of(backend) as opened:
        failed = opened.generate(PROMPT, OPTIONS["plain"])
        with pytest.raises(PassError) as error:
            failed.result()
    made = copied(failed)
    assert made.finish_reason == "error" and made.text == failed.text
    with pytest.raises(PassError) as again:
        made.result()
    assert str(again.value) == str(error.value)


def answer(bundle: Path, options: GenerateOptions) -> Generation:
    with load(bundle, LoadOptions("cpu", threads=1)) as opened:
        return opened.generate(PROMPT, options).result()


def raise_queue_full() -> None:
    raise QueueFull(3, 2, 1)


@pytest.mark.slow
def test_a_worker_of_a_pool_returns_results_and_errors(session: Session, random_bundle: Path):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        result = session.generate(PROMPT, OPTIONS["constraint"]).result()
        made = pool.submit(answer, random_bundle, OPTIONS["constraint"]).result()
        assert (made.text, made.token_ids) == (result.text, result.token_ids)
        with pytest.raises(QueueFull, match=r"^3 requests are waiting already"):
            pool.submit(raise_queue_full).result()


@pytest.mark.parametrize(
    "error",
    [PassError("one"), QueueFull(3, 2, 1), TooManyConstraints(), ConstraintStopped("too long")],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_copied(error: PassError, copied: Callable[[Any], Any]):
    made = copied(error)
    assert type(made) is type(error) and str(made) == str(error)
    assert (made.args, vars(made)) == (error.args, vars(error))


def test_options_and_parts_are_copied(session: Session, copied: Callable[[Any], Any]):
    result = session.generate(PROMPT, OPTIONS["logprobs"])
    pieces = list(result)
    loading = LoadOptions("cpu", threads=1)
    request = session.request((5, 6), OPTIONS["logprobs"].with_fields(logit_bias={}))
    values = (*OPTIONS.values(), SAMPLED, loading, *REQUEST_OPTIONS.values(), session.manifest)
    unprocessed = session.request((5, 6), GenerateOptions(3, plan="two-pass"))
    for value in (*values, unprocessed, *pieces, *result.tokens, result.stats, session.usage()):
        assert copied(value) == value
    assert copied(request).sampling == request.sampling


def test_vocabularies_and_detokenizers_are_pickled(session: Session):
    made = pickle.loads(pickle.dumps(session.vocabulary))
    assert made.all_bytes(320) == session.vocabulary.all_bytes(320)
    texts = Detokenizer(session.vocabulary, PROMPT)
    texts.push(9)
    other = pickle.loads(pickle.dumps(texts))
    assert [other.push(token) for token in range(320)] == [texts.push(t) for t in range(320)]


OF_ONE_PROCESS: dict[str, Callable[[Session], Any]] = {
    "the session": lambda session: session,
    "its backend": lambda session: session.backend,
    "a tuner": lambda session: session.tuner(SamplingParams()),
    "places": lambda session: session.reserve(1),
    # Shallow copies of these share what they hold.
    "a constraint": lambda session: session.request((5,), OPTIONS["constraint"]),
    "bad words": lambda session: session.request((5,), OPTIONS["bad words"]),
}


@pytest.mark.parametrize("name", OF_ONE_PROCESS)
def test_what_belongs_to_a_process_says_so(session: Session, name: str):
    value = OF_ONE_PROCESS[name](session)
    message = r"^a \w+ can be neither pickled nor copied: load the bundle in each process, .*$"
    for how, copied in COPIES.items():
        if how != "copy" or name not in ("a constraint", "bad words"):
            with pytest.raises(PassError, match=message):
                copied(value)
