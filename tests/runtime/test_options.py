"""What a request may ask for: refusals by name, seeds, and token stops."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from reciting import EOS, recite, reciting_session, words
from tokenizers import Tokenizer

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load
from pass_runtime.options import LoadOptions


@pytest.fixture(scope="module")
def real(tiny_bundle):
    return load(tiny_bundle, "cpu", threads=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens"),
        ({"plan": "fast"}, "unknown plan 'fast'"),
        ({"draft": "model"}, "draft must be one of lookahead, ngram, both, not 'model'"),
        ({"stop": (3,)}, "stop_token_ids"),
        *(({"logprobs": count}, "logprobs must be 0 to 20") for count in (-1, 21)),
    ],
)
def test_options_are_refused_by_name(wrong, message):
    with pytest.raises(PassError, match=message):
        GenerateOptions(**wrong)


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


@pytest.mark.parametrize(
    ("kind", "wrong", "name"),
    [
        (GenerateOptions, {"max_new_tokens": 2.5}, "max-new-tokens"),  # was no limit at all
        (GenerateOptions, {"max_new_tokens": True}, "max-new-tokens"),
        (GenerateOptions, {"max_new_tokens": np.float32(3)}, "max-new-tokens"),
        (GenerateOptions, {"max_new_tokens": "3"}, "max-new-tokens"),
        (GenerateOptions, {"max_new_tokens": None}, "max-new-tokens"),
        (GenerateOptions, {"logprobs": 1.5}, "logprobs"),
        (GenerateOptions, {"logprobs": True}, "logprobs"),
        (GenerateOptions, {"lookahead": 1.0}, "lookahead"),
        (GenerateOptions, {"plan": 3}, "plan"),
        (GenerateOptions, {"draft": ["ngram"]}, "draft"),
        (GenerateOptions, {"sampling": {"temperature": 1.0}}, "sampling"),
        (GenerateOptions, {"stop": 5}, "stop"),
        (GenerateOptions, {"stop": b"end"}, "stop"),
        (GenerateOptions, {"stop_token_ids": b"ab"}, "stop-token-ids"),
        (GenerateOptions, {"stop_token_ids": 7}, "stop-token-ids"),
        (GenerateOptions, {"stop_token_ids": [7.0]}, "every one of stop-token-ids"),
        (GenerateOptions, {"ignore_eos": 1}, "ignore-eos"),
        (GenerateOptions, {"reuse_prefix": "no"}, "reuse-prefix"),
        (SamplingParams, {"seed": 1.5}, "seed"),
        (SamplingParams, {"seed": True}, "seed"),
        (SamplingParams, {"top_k": 5.0}, "top-k"),
        (SamplingParams, {"temperature": "0.8"}, "temperature"),
        (SamplingParams, {"temperature": True}, "temperature"),
        (SamplingParams, {"temperature": 10**400}, "temperature"),
        (SamplingParams, {"top_p": 1j}, "top-p"),
        (SamplingParams, {"min_p": [0.1]}, "min-p"),
        (LoadOptions, {"threads": 1.5}, "threads"),
        (LoadOptions, {"max_batch_size": "8"}, "max-batch-size"),
        (LoadOptions, {"max_queue": None}, "max-queue"),
        (LoadOptions, {"capacity": 64.0}, "capacity"),
        (LoadOptions, {"device": None}, "device"),
    ],
)
def test_what_is_of_another_type_is_refused_by_name(kind: type, wrong: dict, name: str):
    with pytest.raises(PassError, match=f"^{name} must be ") as error:
        kind(**wrong)
    assert len(str(error.value).splitlines()) == 1


def test_numpy_numbers_become_those_of_python():
    sampling = SamplingParams(
        np.float32(0.5), np.int64(3), np.float64(0.5), np.uint64(2**64 - 1), np.float16(0.25)
    )
    assert sampling == SamplingParams(0.5, 3, 0.5, 2**64 - 1, 0.25)
    assert {type(value) for value in vars(sampling).values()} == {int, float, dict}
    options = GenerateOptions(
        np.int64(5), stop_token_ids=np.array([7, 8]), logprobs=np.uint8(1), ignore_eos=np.True_
    )
    assert options == GenerateOptions(5, stop_token_ids=(7, 8), logprobs=1, ignore_eos=True)
    assert type(options.max_new_tokens) is type(options.logprobs) is int
    assert LoadOptions(capacity=np.int32(64)).capacity == 64


@pytest.mark.parametrize(
    "call", [Session.generate, Session.generate_ids], ids=["generate", "generate_ids"]
)
def test_prompts_that_are_no_token_ids_are_refused(tiny_bundle, call: Callable):
    """A refused request does not disturb its neighbours."""
    session = reciting_session(tiny_bundle, slots=2)
    beside = session.generate_ids([5], GenerateOptions(30, plan="two-pass", ignore_eos=True))
    wrong = [b"Hello", bytearray(b"Hello"), memoryview(b"Hello"), 5, None, {5: 6}, {5}]
    wrong += [[5, 6.0], [5, True], ["5"], [[5]]]
    message = r"^(every one of )?the prompt's token ids must be "
    for prompt in (*wrong, np.array(5), np.array([5.0]), np.array([[5]]), np.array([True])):
        with pytest.raises(PassError, match=message) as error:
            call(session, prompt)
        assert len(str(error.value).splitlines()) == 1
    assert beside.result().token_ids == [words(position) for position in range(1, 31)]


PROMPTS_5_6 = ((5, 6), range(5, 7), np.array([5, 6], np.uint16), [np.int64(5), np.int32(6)])


@pytest.mark.parametrize("prompt", PROMPTS_5_6, ids=repr)
def test_prompts_of_numpy_are_reported_as_json(tiny_bundle, prompt):
    session = reciting_session(tiny_bundle)
    options = GenerateOptions(
        np.int64(3), SamplingParams(seed=np.int64(4)), plan="ar", stop_token_ids=np.array([300])
    )
    for generate in (session.generate, session.generate_ids):
        found = json.loads(json.dumps(generate(prompt, options).result().as_dict()))
        assert (found["prompt_ids"], found["seed"]) == ([5, 6], 4)
        assert found["token_ids"] == [words(2), words(3), words(4)]


def test_stop_strings_need_text(tiny_bundle):
    for stop in ("x", ("x",)):
        with pytest.raises(PassError, match="stop strings need text"):
            reciting_session(tiny_bundle).generate_ids([5], GenerateOptions(stop=stop))


def test_one_string_is_one_stop(tiny_bundle):
    """Not its letters."""
    assert GenerateOptions(stop="the").stop_strings == ("the",)
    assert GenerateOptions(stop=["a", "", "b"]).stop_strings == ("a", "b")
    ids = Tokenizer.from_file(str(tiny_bundle / "tokenizer.json")).encode("eh, hot: the end").ids
    session = reciting_session(tiny_bundle, recite(ids))
    generation = session.generate([0], GenerateOptions(50, stop="the")).result()
    assert (generation.text, generation.stop_reason) == ("eh, hot: ", "the")


@pytest.mark.parametrize("plan", ["ar", "two-pass", "fused"])
def test_a_stop_string_that_is_a_special_token(tiny_bundle, plan):
    """It ends the text, although it is not part of the text."""
    script = recite([5, 6, 0, 7])  # 0 is <bos>
    options = GenerateOptions(50, plan=plan, stop="<bos>")
    generation = reciting_session(tiny_bundle, script).generate([0], options).result()
    assert (generation.finish_reason, generation.stop_reason) == ("stop", "<bos>")
    assert generation.token_ids == [5, 6, 0]
    assert "<bos>" not in generation.text
    ignoring = GenerateOptions(50, plan=plan, stop="<eos>", ignore_eos=True)
    generation = reciting_session(tiny_bundle, script).generate([0], ignoring).result()
    assert (generation.token_ids, generation.stop_reason) == ([5, 6, 0, 7, EOS], "<eos>")


@pytest.mark.parametrize("plan", ["ar", "two-pass", "fused"])
@pytest.mark.parametrize("at", [1, 2, 5, 9])
def test_a_stop_token_ends_the_text(tiny_bundle, plan, at):
    options = GenerateOptions(50, plan=plan, stop_token_ids=[words(at), 300])
    stream = reciting_session(tiny_bundle).generate_ids([5], options).result()
    assert stream.token_ids == [words(position) for position in range(1, at + 1)]
    assert (stream.finish_reason, stream.stop_reason) == ("stop", words(at))


def test_stop_tokens_beside_an_ignored_end(tiny_bundle):
    script = recite([5, 6, EOS, 7, 8])
    options = GenerateOptions(50, plan="two-pass", stop_token_ids=(7,), ignore_eos=True)
    stream = reciting_session(tiny_bundle, script).generate_ids([0], options).result()
    assert stream.token_ids == [5, 6, EOS, 7]
    with pytest.raises(PassError, match="token id 320"):
        reciting_session(tiny_bundle).generate_ids([0], GenerateOptions(stop_token_ids=(320,)))


def test_seeds_are_random_reported_and_repeat_the_text(real):
    def ask(seed=None):
        sampling = SamplingParams(1.0, seed=seed)
        options = GenerateOptions(24, sampling, plan="two-pass", ignore_eos=True)
        return real.generate("The quick", options).result()

    first, second = ask(), ask()
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert ask(first.seed).token_ids == first.token_ids
    assert ask(0).seed == 0
    assert first.as_dict()["seed"] == first.seed


def test_min_p_keeps_likely_tokens_only(real):
    """Each token's probability is at least a tenth of the likeliest token's."""
    distances = []
    for min_p in (0.1, 0.0):
        sampling = SamplingParams(1.5, seed=3, min_p=min_p)
        options = GenerateOptions(40, sampling, plan="two-pass", logprobs=1, ignore_eos=True)
        stream = real.generate_ids([5, 6], options).result()
        logprobs = [token.logprobs for token in stream.tokens]
        # Log-probabilities are those before temperature 1.5.
        distances.append(max((one.top[0][1] - one.logprob) / 1.5 for one in logprobs))
    assert distances[0] <= -np.log(0.1) < distances[1]
