"""The table of request fields: dataclasses agree with it, and a row makes a field everywhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pass_runtime
from pass_runtime import REQUEST_FIELDS, GenerateOptions, LoadOptions, PassError, SamplingParams
from pass_runtime.bundle.request_fields import DECODING_FIELDS, SAMPLING_FIELDS
from pass_runtime.bundle.values import COMPARISONS
from pass_server.serve_options import ListenOptions, ServeOptions

RUNTIME = Path(pass_runtime.__file__).parents[1]


def test_the_table_and_the_dataclasses_have_the_same_fields_and_defaults():
    assert {field.name: field.default for field in SAMPLING_FIELDS} == vars(SamplingParams())
    defaults = dict(vars(GenerateOptions()))
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
        beyond: Any = bound - 1 if name[0] == "g" else bound + 1
        for value in (beyond, bound):
            valid = bool(COMPARISONS[name](value, bound))
            given = {5: float(value)} if field.kind == "biases" else value
            if field.kind == "whole" and value == float("inf"):
                continue
            if valid:
                assert field.checked(given) == given
            else:
                with pytest.raises(PassError, match=f"^{field.label} must be "):
                    field.checked(given)
    assert bool(field.allowed) == bool(field.bounds)


ROW = """    RequestField(
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
USE_IT = """
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

given = {}
def recorded(options, **more):
    made = make(options, **more)
    given["flag"] = made.sampling.sharpness
    raise PassError("recorded")
make, flags.generate_options = flags.generate_options, recorded
for command in ("generate", "chat", "batch"):
    line = [command, "b", *(["in", "out"] if command == "batch" else []), "--sharpness", "2"]
    CliRunner().invoke(main, line)
    given[command] = given.pop("flag", None)
given["help"] = CliRunner().invoke(main, ["generate", "--help"]).output.split()
given["bench"] = "--sharpness" in CliRunner().invoke(main, ["bench", "--help"]).output
line = parse_request({"prompt": "a", "sharpness": 2.0}).options(GenerateOptions(), 1)
given["line"] = line.sampling.sharpness
given["wrong line"] = refusal(lambda: parse_request({"prompt": "a", "sharpness": "2"}))
chat = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
bases = ((CompletionRequest, {"model": "m", "prompt": "a"}), (ChatRequest, chat))
for model, base in bases:
    request = model.model_validate(base | {"sharpness": 2.0})
    given[model.__name__] = _options(request, None, "").sampling.sharpness
for model, base in (*bases, (ResponsesRequest, {"model": "m", "input": "a"})):
    given["schema of " + model.__name__] = model.model_json_schema()["properties"]["sharpness"]
    wrong = base | {"sharpness": 4.0}
    given["wrong " + model.__name__] = refusal(lambda: model.model_validate(wrong))
given["input"] = [str(field) for field in inputs(tokens=True) if field.name == "sharpness_factor"]
tensors = {"text_input": np.array([b"a"], object), "sharpness_factor": np.array([2], np.float32)}
given["triton"] = read_request("m", tensors, "")[0].sharpness
given["wrong value"] = refusal(lambda: SamplingParams(sharpness=4.0))
given["wrong type"] = refusal(lambda: SamplingParams(sharpness="4"))
print(json.dumps(given))
"""


def test_a_row_of_the_table_is_a_field_everywhere(tmp_path):
    """In a copy of the runtime, the table gets a row, and SamplingParams a field."""
    ignore = shutil.ignore_patterns("__pycache__")
    for package in ("pass_runtime", "pass_server"):
        shutil.copytree(RUNTIME / package, tmp_path / package, ignore=ignore)
    for name, before, more in (
        ("request_fields", "PENALTY_FIELDS = (\n", ROW),
        ("sampling", "    min_p: float = 0.0\n", "    sharpness: float = 0.0\n"),
    ):
        path = tmp_path / "pass_runtime" / "bundle" / f"{name}.py"
        source = path.read_text(encoding="utf-8")
        assert source.count(before) == 1
        path.write_text(source.replace(before, before + more), encoding="utf-8")
    command = [sys.executable, "-c", USE_IT]
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
