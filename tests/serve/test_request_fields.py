"""The table REQUEST_FIELDS: the dataclasses of options agree with it, and a new row is a new field
of all commands and requests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pass_runtime
from pass_runtime import REQUEST_FIELDS, GenerateOptions, LoadOptions, PassError, SamplingParams
from pass_runtime.bundle.request_fields import DECODING_FIELDS, SAMPLING_FIELDS
from pass_runtime.bundle.values import COMPARISONS
from pass_runtime.cli.flags import generate_options
from pass_runtime.cli.main import main
from pass_runtime.cli.request_line import parse_request
from pass_server.api_error import ApiError
from pass_server.parsed_request import _options
from pass_server.responses_chat import ChatConversion
from pass_server.responses_fields import ResponsesRequest
from pass_server.schemas import ChatRequest, CompletionRequest
from pass_server.serve_options import ListenOptions, ServeOptions
from pass_server.triton.tensors import read_request

RUNTIME = Path(pass_runtime.__file__).parents[1]


def test_the_table_and_the_dataclasses_have_the_same_fields_and_defaults():
    assert {field.name: field.default for field in SAMPLING_FIELDS} == vars(SamplingParams())
    defaults = dict(vars(GenerateOptions()))
    # These fields are not in the table.
    for name in ("sampling", "constraint", "reuse_prefix", "shown_special_tokens"):
        del defaults[name]
    assert {field.name: field.default for field in DECODING_FIELDS} == defaults
    names = [field.name for field in REQUEST_FIELDS]
    assert len(names) == len(set(names))


OPTION_FIELDS = [
    field
    for options in (LoadOptions, ServeOptions, ListenOptions)
    for field in options.option_fields().values()
]


@pytest.mark.parametrize("field", [*REQUEST_FIELDS, *OPTION_FIELDS], ids=lambda field: field.name)
def test_bounds_are_checked(field):
    """A value beyond each bound is refused, and the bound itself if it is inclusive."""
    for name, bound in field.bounds.items():
        beyond: Any = bound - 1 if name in ("ge", "gt") else bound + 1
        for number in (beyond, bound):
            valid = bool(COMPARISONS[name](number, bound))
            value = {5: float(number)} if field.kind == "biases" else number
            if field.kind == "whole" and number == float("inf"):
                continue
            if valid:
                assert field.checked(value) == value
            else:
                with pytest.raises(PassError, match=f"^{field.label} must be "):
                    field.checked(value)
    assert bool(field.allowed) == bool(field.bounds)


BOUNDED = [field for field in SAMPLING_FIELDS if field.bounds]
COMMAND = main.commands["generate"]


def by_python(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: {5: value} if name == "logit_bias" else value})


def by_flag(name: str, value: Any) -> SamplingParams:
    flag = "--" + name.replace("_", "-")
    line = ["bundle", flag, f"5={value}" if name == "logit_bias" else str(value)]
    return generate_options(COMMAND.make_context("generate", line).params).sampling


def by_line(name: str, value: Any) -> SamplingParams:
    line = {"prompt": "a", name: {"5": value} if name == "logit_bias" else value}
    return parse_request(line).options(GenerateOptions(), 1).sampling


def by_http(name: str, value: Any) -> SamplingParams:
    fields = {"model": "m", name: {"5": value} if name == "logit_bias" else value}
    chat = ChatRequest.model_validate(fields | {"messages": [{"role": "user", "content": "a"}]})
    responses = ChatConversion(ResponsesRequest.model_validate(fields | {"input": "a"})).chat
    completion = CompletionRequest.model_validate(fields | {"prompt": "a"})
    made = [_options(request, None, "").sampling for request in (chat, responses, completion)]
    assert made[0] == made[1] == made[2]
    return made[0]


def by_triton(name: str, value: Any) -> SamplingParams:
    tensors = {"text_input": np.array([b"a"], object)}
    fields = {name: {"5": value} if name == "logit_bias" else value}
    return _options(read_request("m", tensors, json.dumps(fields))[0], None, "").sampling


@pytest.mark.parametrize("door", [by_python, by_flag, by_line, by_http, by_triton])
@pytest.mark.parametrize("field", BOUNDED, ids=lambda field: field.name)
def test_every_door_has_the_bounds_of_the_table(field, door):
    """But for the HTTP API's own bounds of temperature and seed, which the table has, too."""
    bounds = field.bounds
    if door in (by_http, by_triton):
        bounds = {k: v for k, v in (field.http_schema or bounds).items() if k in COMPARISONS}
    for name, bound in bounds.items():
        beyond: Any = bound - 1 if name in ("ge", "gt") else bound + 1
        for number in (beyond, bound):
            if number == float("inf"):
                continue
            if not COMPARISONS[name](number, bound):
                with pytest.raises((PassError, ApiError, ValueError)):
                    door(field.name, number)
                continue
            taken = getattr(door(field.name, number), field.name)
            assert field.name == "seed" or taken == getattr(
                by_python(field.name, number), field.name
            )


def test_top_k_minus_1_and_top_p_0_are_taken_by_every_door():
    for door in (by_python, by_flag, by_line, by_http, by_triton):
        assert door("top_k", -1).top_k == 0
        assert door("top_p", 0).sampler == "greedy"
        assert door("top_p", 0).resolved().temperature == 0


NEW_ROW = """    RequestField(
        "sharpness",
        "number",
        0.0,
        "Raises the logits of likely tokens.",
        allowed="0 to 3",
        bounds={"ge": 0, "le": 3},
        flag="--sharpness",
        http="sharpness",
        triton="sharpness_factor",
    ),
"""
PROGRAM = """
import json
from click.testing import CliRunner
import numpy as np
from pass_runtime import GenerateOptions, LoadOptions, PassError, SamplingParams
from pass_runtime.cli import flags
from pass_runtime.cli.request_line import parse_request
from pass_runtime.cli.main import main
from pass_server.parsed_request import _options
from pass_server.responses_fields import ResponsesRequest
from pass_server.schemas import ChatRequest, CompletionRequest
from pass_server.triton.config import inputs
from pass_server.triton.tensors import read_request

def refusal(call):
    try:
        call()
    except Exception as error:
        return str(error)

results = {}
def record(*arguments, **options):
    results["flag"] = make(*arguments, **options).sampling.sharpness
    raise PassError("recorded")  # ends the command
make, flags.generate_options = flags.generate_options, record
for command in ("generate", "chat", "batch"):
    line = [command, "b", *(["in", "out"] if command == "batch" else []), "--sharpness", "2"]
    CliRunner().invoke(main, line)
    results[command] = results.pop("flag", None)
results["help"] = CliRunner().invoke(main, ["generate", "--help"]).output.split()
results["bench"] = "--sharpness" in CliRunner().invoke(main, ["bench", "--help"]).output
line = parse_request({"prompt": "a", "sharpness": 2.0}).options(GenerateOptions(), 1)
results["line"] = line.sampling.sharpness
results["wrong line"] = refusal(lambda: parse_request({"prompt": "a", "sharpness": "2"}))
chat = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
bases = ((CompletionRequest, {"model": "m", "prompt": "a"}), (ChatRequest, chat))
for model, base in bases:
    request = model.model_validate(base | {"sharpness": 2.0})
    results[model.__name__] = _options(request, None, "").sampling.sharpness
for model, base in (*bases, (ResponsesRequest, {"model": "m", "input": "a"})):
    results["schema of " + model.__name__] = model.model_json_schema()["properties"]["sharpness"]
    wrong = base | {"sharpness": 4.0}
    results["wrong " + model.__name__] = refusal(lambda: model.model_validate(wrong))
results["input"] = [str(field) for field in inputs(tokens=True) if field.name == "sharpness_factor"]
tensors = {"text_input": np.array([b"a"], object), "sharpness_factor": np.array([2], np.float32)}
results["triton"] = read_request("m", tensors, "")[0].sharpness
results["wrong value"] = refusal(lambda: SamplingParams(sharpness=4.0))
results["wrong type"] = refusal(lambda: SamplingParams(sharpness="4"))
print(json.dumps(results))
"""


def test_a_new_row_is_a_field_of_every_command_and_request(tmp_path):
    """PROGRAM uses a copy of the runtime with a new row, and with its field in SamplingParams."""
    ignore = shutil.ignore_patterns("__pycache__")
    for package in ("pass_runtime", "pass_server"):
        shutil.copytree(RUNTIME / package, tmp_path / package, ignore=ignore)
    for name, before, addition in (
        ("request_fields", "PENALTY_FIELDS = (\n", NEW_ROW),
        ("sampling", "    min_p: float = 0.0\n", "    sharpness: float = 0.0\n"),
    ):
        path = tmp_path / "pass_runtime" / "bundle" / f"{name}.py"
        source = path.read_text(encoding="utf-8")
        assert source.count(before) == 1
        path.write_text(source.replace(before, before + addition), encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    everywhere = ("generate", "chat", "batch", "line", "CompletionRequest", "ChatRequest", "triton")
    assert {name: printed[name] for name in everywhere} == dict.fromkeys(everywhere, 2.0)
    assert "Raises the logits of likely tokens. [default: 0.0]" in " ".join(printed["help"])
    assert not printed["bench"]  # it measures no penalties
    assert "sharpness" in printed["wrong line"]
    for model in ("CompletionRequest", "ChatRequest", "ResponsesRequest"):
        schema = printed[f"schema of {model}"]
        assert schema["description"] == "Raises the logits of likely tokens."
        assert {"type": "number", "minimum": 0, "maximum": 3} in schema["anyOf"]
        assert "less than or equal to 3" in printed[f"wrong {model}"]
    (tensor,) = printed["input"]
    assert tensor == "TensorSpec(name='sharpness_factor', dtype='FP32', dims=1, optional=True)"
    assert printed["wrong value"] == "sharpness must be 0 to 3, not 4.0"
    assert printed["wrong type"] == "sharpness must be a number, not '4'"
