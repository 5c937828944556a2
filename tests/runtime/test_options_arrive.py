from __future__ import annotations

from dataclasses import fields

import pytest
from recorded_arguments import REQUEST_VALUES, SAMPLING_VALUES, Calls, StandIn

from pass_runtime import Constraint, GenerateOptions, LoadOptions, SamplingParams, load
from pass_runtime.options import DEFAULT_MAX_QUEUE

LOAD_CASES = {
    "device": ("cpu", {"OrtBackend.device": "cpu"}),
    "threads": (2, {"OrtBackend.threads": 2}),
    "max_batch_size": (3, {"OrtBackend.max_batch_size": 3}),
    "max_queue": (DEFAULT_MAX_QUEUE + 1, {"Engine.max_queue": DEFAULT_MAX_QUEUE + 1}),
    "capacity": (64, {"OrtBackend.capacity": 64}),
    "logprobs_mode": ("processed", {"Engine.logprobs_mode": "processed"}),
    "speculative_max_concurrency": (3, {"Engine.speculative_max_concurrency": 3}),
    "prefix_cache": (False, {"Engine.prefix_cache": False}),
    "verify": (False, {"verify_files.hashes": False}),
}
"""For each field of `LoadOptions`: a value, and the arguments (by function) that it changes."""
GENERATE_VALUES = {
    name: tuple(value) if isinstance(value, list) else value
    for name, value in REQUEST_VALUES.items()
} | {
    "max_new_tokens": 5,
    "sampling": SamplingParams(1.0, seed=7),
    "reuse_prefix": True,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "constraint": Constraint(regex="a+"),
    "shown_special_tokens": (5,),
}


@pytest.fixture(scope="module")
def session(random_bundle):
    with load(random_bundle, LoadOptions("cpu", threads=1)) as session:
        yield session


def opened_with(bundle, *options, **named):
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        calls.replace("pass_runtime.session.verify_files")
        calls.replace("pass_runtime.backends.ort.backend.OrtBackend", StandIn(calls))
        for name in ("Auto", "Engine", "Worker", "Resolver"):
            calls.replace(f"pass_runtime.session.{name}", StandIn(calls))
        load(bundle, *options, **named)
        return calls.arguments


@pytest.mark.parametrize("name", [field.name for field in fields(LoadOptions)])
def test_an_option_of_load_changes_how_a_bundle_is_opened(random_bundle, name):
    value, expected = LOAD_CASES[name]
    default = opened_with(random_bundle)
    changed = opened_with(random_bundle, LoadOptions(**{name: value}))
    assert {key: changed[key] for key in changed if changed[key] != default[key]} == expected
    # The field as an argument does the same.
    assert opened_with(random_bundle, **{name: value}) == changed
    assert opened_with(random_bundle, LoadOptions(), **{name: value}) == changed


def test_load_takes_a_device_and_no_unknown_options(random_bundle):
    expected = opened_with(random_bundle, LoadOptions("cpu", 2))
    assert opened_with(random_bundle, "cpu", threads=2) == expected
    with pytest.raises(TypeError, match="colour"):
        load(random_bundle, colour="red")


@pytest.mark.parametrize("name", [field.name for field in fields(GenerateOptions)])
def test_an_option_changes_the_request(session, name):
    changed = session.request((5,), GenerateOptions(**{name: GENERATE_VALUES[name]}))
    default = session.request((5,), GenerateOptions())
    assert default == session.request((5,), GenerateOptions()) != changed


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_a_sampling_parameter_changes_the_request(session, name):
    value = {5: -2.0} if name == "logit_bias" else SAMPLING_VALUES[name]
    values = {name: value}
    if name == "temperature":
        values["seed"] = 0  # Without a seed, any two sampled requests differ.
    changed = session.request((5,), GenerateOptions(sampling=SamplingParams(**values)))
    assert getattr(changed.sampling, name) == value
    assert changed != session.request((5,), GenerateOptions())
