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
def model_session(tiny_bundle):
    return load(tiny_bundle, "cpu", threads=1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"plan": "fast"}, "unknown plan 'fast'"),
        ({"draft": "model"}, "draft must be one of lookahead, ngram, both, not 'model'"),
        ({"stop": (3,)}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs must be 0 to 20"),
    ],
)
def test_the_error_says_which_values_are_valid(wrong, message):
    with pytest.raises(PassError, match=message):
        GenerateOptions(**wrong)


NAN, INFINITY = float("nan"), float("inf")
WRONG_VALUES = {
    GenerateOptions: {
        "max_new_tokens": [0, 2.5, True, np.float32(3), "3", None],
        "logprobs": [-1, 21, 1.5, True],
        "prompt_logprobs": [-1, 21, 1.5, True],
        "lookahead": [1.0],
        "plan": [3],
        "draft": [["ngram"]],
        "sampling": [{"temperature": 1.0}],
        "stop": [5, b"end"],
        "stop_token_ids": [b"ab", 7, [7.0]],
        "ignore_eos": [1],
        "reuse_prefix": ["no"],
    },
    SamplingParams: {
        "temperature": [-0.1, NAN, INFINITY, 10**400, "0.8", True],
        "top_k": [-2, 1025, 5.0],
        "top_p": [-0.01, 1.01, NAN, 1j],
        "min_p": [-0.01, 1.01, NAN, [0.1]],
        "seed": [-1, 2**64, 1.5, True],
        "logit_bias": [5, [5], {5: 101.0}, {5: NAN}, {5: "1"}],
    },
    LoadOptions: {
        "threads": [1.5],
        "max_batch_size": ["8"],
        "max_queue": [None],
        "capacity": [64.0],
        "device": [None],
        "logprobs_mode": ["all", None],
    },
}


@pytest.mark.parametrize(
    ("options", "field", "wrong"),
    [
        (options, field, wrong)
        for options, fields in WRONG_VALUES.items()
        for field, values in fields.items()
        for wrong in values
    ],
)
def test_values_out_of_range_or_of_another_type_are_refused_by_name(options, field, wrong):
    name = "every one of stop-token-ids" if wrong == [7.0] else field.replace("_", "-")
    with pytest.raises(PassError, match=f"^{name} must be ") as error:
        options(**{field: wrong})
    assert len(str(error.value).splitlines()) == 1


def test_errors_of_biases_name_the_token():
    with pytest.raises(PassError, match=r"^logit-bias must be -100 to 100, not 101.0 for token 5$"):
        SamplingParams(logit_bias={4: 1.0, 5: 101.0})
    with pytest.raises(PassError, match=r"^a token of logit-bias must be a whole number, not '5'$"):
        SamplingParams(logit_bias={"5": 1.0})
    with pytest.raises(PassError, match=r"^logit-bias has 1025 tokens; at most 1024 are allowed$"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))


@pytest.mark.parametrize(
    ("values", "named"),
    [((), {"colour": "red"}), ((0.0, 0, 1.0, None, 0.0, 0.0, 0.0, 1.0, {}, 5), {})],
    ids=["name", "position"],
)
def test_unknown_arguments_are_type_errors(values: tuple, named: dict):
    with pytest.raises(TypeError, match="SamplingParams"):
        SamplingParams(*values, **named)


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
    """A request that decodes meanwhile is not disturbed."""
    session = reciting_session(tiny_bundle, slots=2)
    running = session.generate_ids([5], GenerateOptions(30, plan="two-pass", ignore_eos=True))
    wrong = [b"Hello", bytearray(b"Hello"), memoryview(b"Hello"), 5, None, {5: 6}, {5}]
    wrong += [[5, 6.0], [5, True], ["5"], [[5]]]
    wrong += [np.array(5), np.array([5.0]), np.array([[5]]), np.array([True])]
    message = r"^(every one of )?the prompt's token ids must be "
    for prompt in wrong:
        with pytest.raises(PassError, match=message) as error:
            call(session, prompt)
        assert len(str(error.value).splitlines()) == 1
    assert running.result().token_ids == [words(position) for position in range(1, 31)]


@pytest.mark.parametrize(
    "prompt",
    [(5, 6), range(5, 7), np.array([5, 6], np.uint16), [np.int64(5), np.int32(6)]],
    ids=repr,
)
def test_results_of_prompts_of_any_integers_are_json(tiny_bundle, prompt):
    session = reciting_session(tiny_bundle)
    options = GenerateOptions(
        np.int64(3), SamplingParams(seed=np.int64(4)), plan="ar", stop_token_ids=np.array([300])
    )
    for generate in (session.generate, session.generate_ids):
        result = json.loads(json.dumps(generate(prompt, options).result().as_dict()))
        assert (result["prompt_ids"], result["seed"]) == ([5, 6], 4)
        assert result["token_ids"] == [words(2), words(3), words(4)]


def test_stop_strings_are_refused_where_no_text_is_made(tiny_bundle):
    for stop in ("x", ("x",)):
        with pytest.raises(PassError, match="stop strings need text"):
            reciting_session(tiny_bundle).generate_ids([5], GenerateOptions(stop=stop))


def test_a_single_string_is_one_stop_and_not_its_letters(tiny_bundle):
    assert GenerateOptions(stop="the").stop == ("the",)
    assert GenerateOptions(stop=["a", "", "b"]).stop == ("a", "b")
    ids = Tokenizer.from_file(str(tiny_bundle / "tokenizer.json")).encode("eh, hot: the end").ids
    session = reciting_session(tiny_bundle, recite(ids))
    generation = session.generate([0], GenerateOptions(50, stop="the")).result()
    assert (generation.text, generation.stop_reason) == ("eh, hot: ", "the")


@pytest.mark.parametrize("plan", ["ar", "two-pass", "fused"])
def test_a_stop_string_that_names_a_special_token_ends_the_text(tiny_bundle, plan):
    """Special tokens are not part of the text, but their names may be stops."""
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


def test_stop_tokens_end_a_text_that_ignores_end_of_sequence(tiny_bundle):
    script = recite([5, 6, EOS, 7, 8])
    options = GenerateOptions(50, plan="two-pass", stop_token_ids=(7,), ignore_eos=True)
    stream = reciting_session(tiny_bundle, script).generate_ids([0], options).result()
    assert stream.token_ids == [5, 6, EOS, 7]


def test_stop_tokens_beyond_the_vocabulary_are_refused(tiny_bundle):
    with pytest.raises(PassError, match="token id 320"):
        reciting_session(tiny_bundle).generate_ids([0], GenerateOptions(stop_token_ids=(320,)))


def test_seeds_are_random_reported_and_repeat_the_text(model_session):
    def generate(seed=None):
        sampling = SamplingParams(1.0, seed=seed)
        options = GenerateOptions(24, sampling, plan="two-pass", ignore_eos=True)
        return model_session.generate("The quick", options).result()

    first, second = generate(), generate()
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert generate(first.seed).token_ids == first.token_ids
    assert generate(0).seed == 0
    assert first.as_dict()["seed"] == first.seed


def test_min_p_keeps_likely_tokens_only(model_session):
    """Each token's probability is at least a tenth of the likeliest token's."""
    max_distances = []  # between the log-probabilities of the likeliest token and the drawn one
    for min_p in (0.1, 0.0):
        sampling = SamplingParams(1.5, seed=3, min_p=min_p)
        options = GenerateOptions(40, sampling, plan="two-pass", logprobs=1, ignore_eos=True)
        stream = model_session.generate_ids([5, 6], options).result()
        logprobs = [token.logprobs for token in stream.tokens]
        # The reported log-probabilities are those before temperature 1.5.
        max_distances.append(max((each.top[0][1] - each.logprob) / 1.5 for each in logprobs))
    assert max_distances[0] <= -np.log(0.1) < max_distances[1]


PLANS = ("ar", "two-pass", "fused")


@pytest.mark.parametrize("top_p", [0, 0.0, 1e-300, 2.0**-127])
@pytest.mark.parametrize(
    "more", [{}, {"top_k": 7}, {"min_p": 0.5}, {"presence_penalty": 1.0}], ids=str
)
def test_top_p_0_takes_the_likeliest_token(model_session, top_p, more):
    """As temperature 0 does, also beside requests that draw tokens. 1e-300 is 0 in float32."""
    greedy = {name: value for name, value in more.items() if name == "presence_penalty"}
    expected = {
        plan: model_session.generate_ids(
            [5, 6], GenerateOptions(20, SamplingParams(**greedy), plan=plan, ignore_eos=True)
        ).result()
        for plan in PLANS
    }
    for plan in PLANS:
        sampling = SamplingParams(1.3, top_p=top_p, **more)
        options = GenerateOptions(20, sampling, plan=plan, ignore_eos=True)
        generation = model_session.generate_ids([5, 6], options).result()
        assert generation.token_ids == expected[plan].token_ids
        assert generation.seed == 0


def test_top_k_minus_1_is_off():
    assert SamplingParams(1.0, -1) == SamplingParams(1.0)
    assert SamplingParams(1.0, -1).sampler == "sample"


def test_a_request_that_changes_top_p_0_draws_again():
    """As a line of pass-run batch that overrides a flag."""
    options = GenerateOptions(sampling=SamplingParams(0.8, top_p=0)).with_fields(top_p=0.5)
    assert options.sampling == SamplingParams(0.8, top_p=0.5)
