"""Every field of the options changes something: how a bundle is opened, or what a request is."""

from __future__ import annotations

from dataclasses import fields

import pytest
from recorded_arguments import Calls, StandIn

from pass_runtime import Constraint, GenerateOptions, LoadOptions, SamplingParams, load
from pass_runtime.options import DEFAULT_MAX_QUEUE

OPENED = {
    "device": ("cpu", {"open_backend.device": "cpu"}),
    "threads": (2, {"open_backend.threads": 2}),
    "max_batch_size": (3, {"open_backend.max_batch_size": 3}),
    "max_queue": (DEFAULT_MAX_QUEUE + 1, {"Session.max_queue": DEFAULT_MAX_QUEUE + 1}),
    "capacity": (64, {"open_backend.capacity": 64}),
    "weight_cache": (False, {"open_backend.weight_cache": False}),
    "logprobs_mode": ("processed", {"Session.logprobs_mode": "processed"}),
    "speculative_max_concurrency": (3, {"Session.speculative_max_concurrency": 3}),
    "prefix_cache": (False, {"Session.prefix_cache": False}),
    "verify": (False, {"open_backend.verify": False, "verify_files.hashes": False}),
}
SAMPLED = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {5: -2.0},
}
REQUESTED = {
    "max_new_tokens": 5,
    "sampling": SamplingParams(1.0, seed=7),
    "plan": "fused",
    "lookahead": 1,
    "draft": "lookahead",
    "stop": ("a",),
    "stop_token_ids": (5,),
    "ignore_eos": True,
    "reuse_prefix": True,
    "cache_salt": "s",
    "logprobs": 2,
    "constraint": Constraint(regex="a+"),
    "min_tokens": 2,
    "bad_words": ("a",),
    "allowed_token_ids": (5,),
    "shown_special_tokens": (5,),
}


@pytest.fixture(scope="module")
def session(random_bundle):
    with load(random_bundle, LoadOptions("cpu", threads=1)) as session:
        yield session


def opened_with(bundle, *options, **named):
    """The arguments of the functions that open a bundle."""
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        calls.replace("pass_runtime.session.verify_files")
        calls.replace("pass_runtime.session.open_backend", StandIn(calls))
        calls.replace("pass_runtime.session.Session", StandIn(calls))
        load(bundle, *options, **named)
        return calls.arguments


@pytest.mark.parametrize("name", [each.name for each in fields(LoadOptions)])
def test_an_option_of_load_changes_how_a_bundle_is_opened(random_bundle, name):
    value, expected = OPENED[name]
    before = opened_with(random_bundle)
    after = opened_with(random_bundle, LoadOptions(**{name: value}))
    assert {key: after[key] for key in after if after[key] != before[key]} == expected
    # The field as an argument does the same.
    assert opened_with(random_bundle, **{name: value}) == after
    assert opened_with(random_bundle, LoadOptions(), **{name: value}) == after


def test_load_takes_a_device_and_no_unknown_options(random_bundle):
    expected = opened_with(random_bundle, LoadOptions("cpu", 2))
    assert opened_with(random_bundle, "cpu", threads=2) == expected
    with pytest.raises(TypeError, match="colour"):
        load(random_bundle, colour="red")


@pytest.mark.parametrize("name", [each.name for each in fields(GenerateOptions)])
def test_an_option_of_a_request_changes_it(session, name):
    changed = session.request((5,), GenerateOptions(**{name: REQUESTED[name]}))
    plain = session.request((5,), GenerateOptions())
    assert plain == session.request((5,), GenerateOptions()) != changed


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingParams)])
def test_a_parameter_of_sampling_changes_a_request(session, name):
    plain, changed = (
        GenerateOptions(sampling=SamplingParams(**more)) for more in ({}, {name: SAMPLED[name]})
    )
    if name == "temperature":
        changed = GenerateOptions(sampling=SamplingParams(SAMPLED[name], seed=0))
    assert getattr(session.request((5,), changed).sampling, name) == SAMPLED[name]
    assert session.request((5,), changed) != session.request((5,), plain)
