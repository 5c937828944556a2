"""Every option of pass-export and pass-train changes what the command hands on to the calls that do
its work."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recorded_arguments import ANYTHING_ELSE, Calls, Case, StandIn, changes, option_names

from pass_exporter.cli import main as export_main
from pass_exporter.triton import RepositoryConfig, config_pbtxt
from pass_runtime.options import LoadOptions
from pass_server.triton.config import LIMIT_PARAMETERS, LOAD_PARAMETERS, PARAMETERS, read_settings
from pass_trainer.cli import main as train_main

BUNDLE = "bundle"
EXPORT = ["--model", "m", "--dtype", "fp16"]
ENGINE = [*EXPORT, "--engine", "tensorrt"]
INT4 = [*EXPORT, "--weights", "int4"]
Values = dict[str, tuple[str, Any]]
"""By option: words of a command line, and the value that they give."""


def cases(target: str, values: Values, base: list[str] | None = None) -> dict[str, Case]:
    """Return cases of options that set the field of `target` that has their name."""
    return {
        name: Case(words.split(), {f"{target}.{name}": value}, base)
        for name, (words, value) in values.items()
    }


BUILT: Values = {
    "max_batch_size": ("--max-batch-size 3", 3),
    "max_seq_len": ("--max-seq-len 64", 64),
    "capacity": ("--capacity 64", 64),
    "prefill_widths": ("--prefill-widths 8,4", (8, 4)),
    "workspace": ("--workspace 9", 9),
    "timing_cache": ("--timing-cache file", Path("file")),
    "compute_capability": ("--compute-capability 8.9 --compute-capability 9.0", ("8.9", "9.0")),
    "device_memory": ("--device-memory 9", 9.0),
}
SERVED: Values = {
    "max_batch_size": ("--max-batch-size 3", 3),
    "max_queue": ("--max-queue 3", 3),
    "max_prompt_tokens": ("--max-prompt-tokens 3", 3),
    "max_output_tokens": ("--max-output-tokens 3", 3),
    "request_seconds": ("--request-seconds 3", 3.0),
    "drain_seconds": ("--drain-seconds 3", 3.0),
    "device": ("--device cpu", "cpu"),
    "threads": ("--threads 3", 3),
    "capacity": ("--capacity 64", 64),
    "reuse_prefix": ("--reuse-prefix", True),
    "prefix_cache": ("--no-prefix-cache", False),
    "speculative_max_concurrency": ("--speculative-max-concurrency 3", 3),
    "logprobs_mode": ("--logprobs-mode processed", "processed"),
}
EXPORTED: Values = {
    "model": ("--model n", "n"),
    "revision": ("--revision r", "r"),
    "lookahead": ("--lookahead 2", 2),
    "lookahead_weights": ("--lookahead-weights w", Path("w")),
    "output": ("-o out", Path("out")),
    "dtype": ("--dtype bf16", "bf16"),
    "weights": ("--weights int4", "int4"),
    "cuda_attention": ("--cuda-attention group-query", "group-query"),
    "rule": ("--rule rejection", "rejection"),
    "verify": ("--verify text", Path("text")),
}
EXPORTED_IN_INT4: Values = {
    "calibrate": ("--calibrate none", Path("none")),
    "zero_points": ("--zero-points", True),
}
REPOSITORY: Values = {
    "output": ("-o other", Path("other")),
    "served_model_name": ("--served-model-name n", "n"),
    "instances": ("--instances 2", 2),
    "force": ("--force", True),
}
TRAIN = ["--model", "m", "-o", "out"]
RECIPE = {
    "sequences": ("--sequences 99", ("sequences", 99)),
    "sequence_length": ("--sequence-length 99", ("length", 99)),
    "prompt_tokens": ("--prompt-tokens 5 6", ("prompt", (5, 6))),
    "temperatures": ("--temperatures 0,2", ("temperatures", (0.0, 2.0))),
    "chat_share": ("--chat-share 0.5", ("chat", 0.5)),
}
TRAINED: Values = {
    "model": ("--model n", "n"),
    "revision": ("--revision r", "r"),
    "data": ("--data a --data b", (Path("a"), Path("b"))),
    "output": ("-o other", Path("other")),
    "lookahead": ("--lookahead 2", 2),
    "adapter": ("--adapter lora", "lora"),
    "head": ("--head", True),
    "start": ("--start weights", Path("weights")),
    "steps": ("--steps 9", 9),
    "write_text": ("--write-text between", "between"),
    "batch": ("--batch 9", 9),
    "anchors": ("--anchors 9", 9),
    "lr": ("--lr 0.5", 0.5),
    "decay": ("--decay 0.5", 0.5),
    "aim": ("--aim acceptance", "acceptance"),
    "held_out": ("--held-out 9", 9),
    "write_with": ("--write-with torch", "torch"),
    "dtype": ("--dtype fp32", "fp32"),
    "device": ("--device cpu", "cpu"),
    "resume": ("--resume", True),
    "checkpoint_minutes": ("--checkpoint-minutes 9", 9.0),
}
WITH_ADAPTER: Values = {"rank": ("--rank 2", 2), "adapter_from": ("--adapter-from 2", 2)}
WITH_HEAD: Values = {"head_rank": ("--head-rank 2", 2), "head_width": ("--head-width 2", 2)}
EVALUATE = ["weights", "--model", "m"]
EVALUATED: Values = {
    "model": ("--model n", "n"),
    "revision": ("--revision r", "r"),
    "prompts": ("--prompts file", Path("file")),
    "kinds": ("--kinds code", ("code",)),
    "each": ("--each 2", 2),
    "tokens": ("--tokens 9", 9),
    "temperatures": ("--temperatures 0,2", (0.0, 2.0)),
    "top_k": ("--top-k 9", 9),
    "lookahead": ("--lookahead 2", 2),
    "dtype": ("--dtype bf16", "bf16"),
    "device": ("--device cpu", "cpu"),
}
REPORT = {"model": "m", "weights": "weights", "prompts": 0, "tokens": 128, "top_k": 0}
REPORT |= {"lookahead": 4, "dtype": "fp32", "temperatures": {}}
COMMANDS = {
    "pass-export": (
        (export_main, []),
        EXPORT,
        {
            **cases("EngineConfig", BUILT, ENGINE),
            **cases("ExportConfig", EXPORTED),
            **cases("ExportConfig", EXPORTED_IN_INT4, INT4),
            **cases("ExportConfig", {"target": ("--target cpu", "cpu")}, ["--model", "m"]),
            "max_perplexity_ratio": Case(
                ["--max-perplexity-ratio", 2],
                {"ExportConfig.max_perplexity_ratio": 2.0},
                [*EXPORT, "--verify", "text"],
            ),
            "engine": Case(
                ["--engine", "tensorrt"], {"EngineConfig.engine": "tensorrt", ANYTHING_ELSE: None}
            ),
            "force": Case(
                ["--force"], {"ExportConfig.force": True, "EngineConfig.force": True}, ENGINE
            ),
        },
    ),
    "pass-export build": (
        (export_main, ["build"]),
        [BUNDLE, "--engine", "tensorrt"],
        {
            **cases("EngineConfig", BUILT),
            "bundle": Case([], {"_build.bundle": Path("other")}, ["other", "--engine", "tensorrt"]),
            "engine": Case(["--engine", "tensorrt-rtx"], {"EngineConfig.engine": "tensorrt-rtx"}),
            "verify": Case(["--verify"], {"EngineConfig.verify": True}),
            "force": Case(["--force"], {"EngineConfig.force": True}),
        },
    ),
    "pass-export triton": (
        (export_main, ["triton"]),
        [BUNDLE, "-o", "out"],
        {
            **cases("RepositoryConfig", REPOSITORY),
            **{
                name: Case(words.split(), {"RepositoryConfig.parameters": {name: value}})
                for name, (words, value) in SERVED.items()
            },
            "bundle": Case([], {"RepositoryConfig.bundle": Path("other")}, ["other", "-o", "out"]),
            "text": Case(["--tokens"], {"RepositoryConfig.tokens": True}),
            "reference": Case(["--copy"], {"RepositoryConfig.copy": True}),
        },
    ),
    "pass-train": (
        (train_main, []),
        TRAIN,
        {
            **{
                name: Case(
                    words.split(), {f"TrainConfig.recipe.{key}": value}, [*TRAIN, "--data", "text"]
                )
                for name, (words, (key, value)) in RECIPE.items()
            },
            **cases("TrainConfig", TRAINED),
            **cases("TrainConfig", WITH_ADAPTER, [*TRAIN, "--adapter", "lora"]),
            **cases("TrainConfig", WITH_HEAD, [*TRAIN, "--head"]),
            "minutes": Case(["--minutes", 9], {"TrainConfig.minutes": 9.0, ANYTHING_ELSE: None}),
            "seed": Case(["--seed", 9], {"TrainConfig.seed": 9, "TrainConfig.recipe.seed": 9}),
        },
    ),
    "pass-train evaluate": (
        (train_main, ["evaluate"]),
        EVALUATE,
        {
            **cases("EvaluateConfig", EVALUATED),
            "weights": Case(
                [], {"EvaluateConfig.weights": Path("other")}, ["other", "--model", "m"]
            ),
            "record": Case(["--record"], {"write_results.report": REPORT}),
            "as_json": Case(["--json"], {"to_json.value": REPORT}),
        },
    ),
}
CASES = [(command, option) for command, (_, _, named) in COMMANDS.items() for option in named]


def prepare(calls: Calls) -> None:
    """Replace what the commands call, but for what parses their options."""
    for name in ("_export", "_build", "_check_engine", "write_model"):
        calls.replace(f"pass_exporter.cli.{name}")
    calls.replace("pass_trainer.run.run", StandIn(calls, {"agreement": None, "weights": "w"}))
    calls.replace("pass_trainer.evaluation.evaluate.evaluate", {})
    calls.replace("pass_trainer.evaluation.evaluate.read_prompt_set", [], recorded=False)
    calls.replace("pass_trainer.evaluation.record.check_recordable", recorded=False)
    calls.replace("pass_trainer.evaluation.record.write_results")
    for name in ("_print_agreement", "_print_evaluation"):
        calls.replace(f"pass_trainer.cli.{name}", recorded=False)
    calls.replace("pass_trainer.cli.to_json", "{}")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights").touch()


@pytest.mark.parametrize("command", COMMANDS)
def test_there_is_a_case_for_every_option(command):
    (main, words), _, named = COMMANDS[command]
    assert set(named) == option_names(main.commands[words[0]] if words else main)


def test_there_is_a_table_for_every_command():
    assert {f"pass-export {name}".strip() for name in ("", *export_main.commands)} | {
        f"pass-train {name}".strip() for name in ("", *train_main.commands)
    } == COMMANDS.keys()


@pytest.mark.parametrize(("command", "option"), CASES)
def test_an_option_changes_what_it_is_for(command, option):
    (main, words), base, named = COMMANDS[command]
    assert changes(main, words, base, named[option], prepare) == named[option].expected


WITHOUT_USE = {
    "pass-export": [[*EXPORT, *words.split()] for words, _ in BUILT.values()],
    "pass-train": [[*TRAIN, *words.split()] for words, _ in (WITH_ADAPTER | WITH_HEAD).values()]
    + [[*TRAIN, *RECIPE[name][0].split()] for name in ("prompt_tokens", "chat_share")],
}


@pytest.mark.parametrize("command", WITHOUT_USE)
def test_an_option_that_would_change_nothing_is_refused(command, monkeypatch):
    prepare(Calls(monkeypatch))
    for line in WITHOUT_USE[command]:
        result = CliRunner().invoke(COMMANDS[command][0][0], line)
        assert result.exit_code == 2, line
        assert "--" in result.stderr


def test_triton_reads_every_parameter_that_is_written():
    """The names of config.pbtxt, of the command's options, and of what is opened and limited."""
    assert SERVED.keys() == PARAMETERS.keys()
    config = RepositoryConfig(
        Path(BUNDLE), Path("out"), parameters={name: value for name, (_, value) in SERVED.items()}
    )
    written = dict(
        re.findall(r'key: "(\w+)" value { string_value: "(.*)" }', config_pbtxt("m", config))
    )
    settings = read_settings(written)
    found = {name: getattr(settings.load, name) for name in LOAD_PARAMETERS}
    found |= {name: getattr(settings.serve, name) for name in LIMIT_PARAMETERS} | {
        "drain_seconds": settings.drain_seconds
    }
    assert found == {name: value for name, (_, value) in SERVED.items()}
    names = {each.name for each in fields(LoadOptions)}
    assert names - set(LOAD_PARAMETERS) == {"max_queue", "verify"}
