"""Every option of pass-export and pass-train changes what the command hands on to the calls that do
its work."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner
from handed_on import ANYTHING_ELSE, Calls, Case, StandIn, changes, option_names

from pass_exporter.cli import main as export_main
from pass_exporter.triton import RepositoryConfig, config_pbtxt
from pass_runtime.options import LoadOptions
from pass_server.triton.config import LIMIT_NAMES, LOAD_NAMES, PARAMETER_TYPES, read_settings
from pass_trainer.cli import main as train_main

BUNDLE = "bundle"
EXPORT = ["--model", "m", "--dtype", "fp16"]
ENGINE = [*EXPORT, "--engine", "tensorrt"]
INT4 = [*EXPORT, "--weights", "int4"]
BUILT = {
    "max_batch_size": (["--max-batch-size", 3], 3),
    "max_seq_len": (["--max-seq-len", 64], 64),
    "capacity": (["--capacity", 64], 64),
    "prefill_widths": (["--prefill-widths", "8,4"], (8, 4)),
    "workspace": (["--workspace", 9], 9),
    "timing_cache": (["--timing-cache", "file"], Path("file")),
    "compute_capability": (
        ["--compute-capability", "8.9", "--compute-capability", "9.0"],
        ("8.9", "9.0"),
    ),
    "device_memory": (["--device-memory", 9], 9.0),
}
SERVED = {
    "max_batch_size": (["--max-batch-size", 3], 3),
    "max_queue": (["--max-queue", 3], 3),
    "max_prompt_tokens": (["--max-prompt-tokens", 3], 3),
    "max_output_tokens": (["--max-output-tokens", 3], 3),
    "request_seconds": (["--request-seconds", 3], 3.0),
    "drain_seconds": (["--drain-seconds", 3], 3.0),
    "device": (["--device", "cpu"], "cpu"),
    "threads": (["--threads", 3], 3),
    "capacity": (["--capacity", 64], 64),
    "reuse_prefix": (["--reuse-prefix"], True),
    "weight_cache": (["--no-weight-cache"], False),
    "prefix_cache": (["--no-prefix-cache"], False),
    "speculative_max_concurrency": (["--speculative-max-concurrency", 3], 3),
    "logprobs_mode": (["--logprobs-mode", "processed"], "processed"),
}
TRAIN = ["--model", "m", "-o", "out"]
RECIPE = {
    "sequences": (["--sequences", 99], ("sequences", 99)),
    "sequence_length": (["--sequence-length", 99], ("length", 99)),
    "prompt_tokens": (["--prompt-tokens", 5, 6], ("prompt", (5, 6))),
    "temperatures": (["--temperatures", "0,2"], ("temperatures", (0.0, 2.0))),
    "chat_share": (["--chat-share", 0.5], ("chat", 0.5)),
}
EVALUATE = ["weights", "--model", "m"]
REPORT = {
    "model": "m",
    "weights": "weights",
    "prompts": 0,
    "tokens": 128,
    "top_k": 0,
    "lookahead": 4,
    "dtype": "fp32",
}
REPORT |= {"temperatures": {}}
COMMANDS = {
    "pass-export": (
        (export_main, []),
        EXPORT,
        {
            **{
                name: Case(given, {f"EngineConfig.{name}": value}, ENGINE)
                for name, (given, value) in BUILT.items()
            },
            "model": Case(["--model", "n"], {"ExportConfig.model": "n"}),
            "revision": Case(["--revision", "r"], {"ExportConfig.revision": "r"}),
            "lookahead": Case(["--lookahead", 2], {"ExportConfig.lookahead": 2}),
            "lookahead_weights": Case(
                ["--lookahead-weights", "w"], {"ExportConfig.lookahead_weights": Path("w")}
            ),
            "output": Case(["-o", "out"], {"ExportConfig.output": Path("out")}),
            "dtype": Case(["--dtype", "bf16"], {"ExportConfig.dtype": "bf16"}),
            "weights": Case(["--weights", "int4"], {"ExportConfig.weights": "int4"}),
            "calibrate": Case(
                ["--calibrate", "none"], {"ExportConfig.calibrate": Path("none")}, INT4
            ),
            "zero_points": Case(["--zero-points"], {"ExportConfig.zero_points": True}, INT4),
            "cuda_attention": Case(
                ["--cuda-attention", "group-query"], {"ExportConfig.cuda_attention": "group-query"}
            ),
            "rule": Case(["--rule", "rejection"], {"ExportConfig.rule": "rejection"}),
            "verify": Case(["--verify", "text"], {"ExportConfig.verify": Path("text")}),
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
            **{
                name: Case(given, {f"EngineConfig.{name}": value})
                for name, (given, value) in BUILT.items()
            },
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
            **{
                name: Case(given, {f"RepositoryConfig.{name}": value})
                for name, (given, value) in SERVED.items()
            },
            "bundle": Case([], {"RepositoryConfig.bundle": Path("other")}, ["other", "-o", "out"]),
            "output": Case(["-o", "other"], {"RepositoryConfig.output": Path("other")}),
            "served_model_name": Case(
                ["--served-model-name", "n"], {"RepositoryConfig.served_model_name": "n"}
            ),
            "text": Case(["--tokens"], {"RepositoryConfig.tokens": True}),
            "reference": Case(["--copy"], {"RepositoryConfig.copy": True}),
            "instances": Case(["--instances", 2], {"RepositoryConfig.instances": 2}),
            "force": Case(["--force"], {"RepositoryConfig.force": True}),
        },
    ),
    "pass-train": (
        (train_main, []),
        TRAIN,
        {
            **{
                name: Case(given, {f"TrainConfig.recipe.{key}": value}, [*TRAIN, "--data", "text"])
                for name, (given, (key, value)) in RECIPE.items()
            },
            "model": Case(["--model", "n"], {"TrainConfig.model": "n"}),
            "revision": Case(["--revision", "r"], {"TrainConfig.revision": "r"}),
            "data": Case(
                ["--data", "a", "--data", "b"], {"TrainConfig.data": (Path("a"), Path("b"))}
            ),
            "output": Case(["-o", "other"], {"TrainConfig.output": Path("other")}),
            "lookahead": Case(["--lookahead", 2], {"TrainConfig.lookahead": 2}),
            "adapter": Case(["--adapter", "lora"], {"TrainConfig.adapter": "lora"}),
            "rank": Case(["--rank", 2], {"TrainConfig.rank": 2}, [*TRAIN, "--adapter", "lora"]),
            "adapter_from": Case(
                ["--adapter-from", 2],
                {"TrainConfig.adapter_from": 2},
                [*TRAIN, "--adapter", "lora"],
            ),
            "head": Case(["--head"], {"TrainConfig.head": True}),
            "head_rank": Case(["--head-rank", 2], {"TrainConfig.head_rank": 2}, [*TRAIN, "--head"]),
            "head_width": Case(
                ["--head-width", 2], {"TrainConfig.head_width": 2}, [*TRAIN, "--head"]
            ),
            "start": Case(["--start", "weights"], {"TrainConfig.start": Path("weights")}),
            "steps": Case(["--steps", 9], {"TrainConfig.steps": 9}),
            "minutes": Case(["--minutes", 9], {"TrainConfig.minutes": 9.0, ANYTHING_ELSE: None}),
            "write_text": Case(["--write-text", "between"], {"TrainConfig.write_text": "between"}),
            "batch": Case(["--batch", 9], {"TrainConfig.batch": 9}),
            "anchors": Case(["--anchors", 9], {"TrainConfig.anchors": 9}),
            "lr": Case(["--lr", 0.5], {"TrainConfig.lr": 0.5}),
            "decay": Case(["--decay", 0.5], {"TrainConfig.decay": 0.5}),
            "aim": Case(["--aim", "acceptance"], {"TrainConfig.aim": "acceptance"}),
            "held_out": Case(["--held-out", 9], {"TrainConfig.held_out": 9}),
            "write_with": Case(["--write-with", "torch"], {"TrainConfig.write_with": "torch"}),
            "seed": Case(["--seed", 9], {"TrainConfig.seed": 9, "TrainConfig.recipe.seed": 9}),
            "dtype": Case(["--dtype", "fp32"], {"TrainConfig.dtype": "fp32"}),
            "device": Case(["--device", "cpu"], {"TrainConfig.device": "cpu"}),
            "resume": Case(["--resume"], {"TrainConfig.resume": True}),
            "checkpoint_minutes": Case(
                ["--checkpoint-minutes", 9], {"TrainConfig.checkpoint_minutes": 9.0}
            ),
        },
    ),
    "pass-train evaluate": (
        (train_main, ["evaluate"]),
        EVALUATE,
        {
            "weights": Case(
                [], {"EvaluateConfig.weights": Path("other")}, ["other", "--model", "m"]
            ),
            "model": Case(["--model", "n"], {"EvaluateConfig.model": "n"}),
            "revision": Case(["--revision", "r"], {"EvaluateConfig.revision": "r"}),
            "prompts": Case(["--prompts", "file"], {"EvaluateConfig.prompts": Path("file")}),
            "kinds": Case(["--kinds", "code"], {"EvaluateConfig.kinds": ("code",)}),
            "each": Case(["--each", 2], {"EvaluateConfig.each": 2}),
            "tokens": Case(["--tokens", 9], {"EvaluateConfig.tokens": 9}),
            "temperatures": Case(
                ["--temperatures", "0,2"], {"EvaluateConfig.temperatures": (0.0, 2.0)}
            ),
            "top_k": Case(["--top-k", 9], {"EvaluateConfig.top_k": 9}),
            "lookahead": Case(["--lookahead", 2], {"EvaluateConfig.lookahead": 2}),
            "dtype": Case(["--dtype", "bf16"], {"EvaluateConfig.dtype": "bf16"}),
            "device": Case(["--device", "cpu"], {"EvaluateConfig.device": "cpu"}),
            "record": Case(["--record"], {"write_results.report": REPORT}),
            "as_json": Case(["--json"], {"to_json.value": REPORT}),
        },
    ),
}
CASES = [(command, option) for command, (_, _, cases) in COMMANDS.items() for option in cases]


def prepare(calls: Calls) -> None:
    """Replace what the commands call, but for what parses their options."""
    for name in ("_export", "_build", "_check_engine", "write_model"):
        calls.replace(f"pass_exporter.cli.{name}")
    calls.replace("pass_trainer.run.run", StandIn(calls, {"agreement": None, "weights": "w"}))
    calls.replace("pass_trainer.evaluation.evaluate.evaluate", {})
    calls.replace("pass_trainer.evaluation.evaluate.read_prompt_set", [], noted=False)
    calls.replace("pass_trainer.evaluation.record.check_recordable", noted=False)
    calls.replace("pass_trainer.evaluation.record.write_results")
    for name in ("_print_agreement", "_print_evaluation"):
        calls.replace(f"pass_trainer.cli.{name}", noted=False)
    calls.replace("pass_trainer.cli.to_json", "{}")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights").touch()


@pytest.mark.parametrize("command", COMMANDS)
def test_there_is_a_case_for_every_option(command):
    (main, words), _, cases = COMMANDS[command]
    assert set(cases) == option_names(main.commands[words[0]] if words else main)


def test_there_is_a_table_for_every_command():
    assert {f"pass-export {name}".strip() for name in ("", *export_main.commands)} | {
        f"pass-train {name}".strip() for name in ("", *train_main.commands)
    } == COMMANDS.keys()


@pytest.mark.parametrize(("command", "option"), CASES)
def test_an_option_changes_what_it_is_for(command, option):
    (main, words), base, cases = COMMANDS[command]
    assert changes(main, words, base, cases[option], prepare) == cases[option].expected


WITHOUT_USE = {
    "pass-export": [[*EXPORT, *given] for given, _ in BUILT.values()],
    "pass-train": [
        [*TRAIN, *more]
        for more in (
            ["--rank", 2],
            ["--adapter-from", 2],
            ["--head-rank", 2],
            ["--head-width", 2],
            ["--prompt-tokens", 5, 6],
            ["--chat-share", 0.5],
        )
    ],
}


@pytest.mark.parametrize("command", WITHOUT_USE)
def test_an_option_that_would_change_nothing_is_refused(command, monkeypatch):
    prepare(Calls(monkeypatch))
    for line in WITHOUT_USE[command]:
        result = CliRunner().invoke(COMMANDS[command][0][0], [str(word) for word in line])
        assert result.exit_code == 2, line
        assert "--" in result.stderr


def test_triton_reads_every_parameter_that_is_written():
    """The names of config.pbtxt, of the command's options, and of what is opened and limited."""
    assert SERVED.keys() == PARAMETER_TYPES.keys()
    config = RepositoryConfig(
        Path(BUNDLE), Path("out"), **{name: value for name, (_, value) in SERVED.items()}
    )
    written = dict(
        re.findall(r'key: "(\w+)" value { string_value: "(.*)" }', config_pbtxt("m", config))
    )
    settings = read_settings(written)
    found = {name: getattr(settings.load, name) for name in LOAD_NAMES}
    found |= {name: getattr(settings.serve, name) for name in LIMIT_NAMES} | {
        "drain_seconds": settings.drain_seconds
    }
    assert found == {name: value for name, (_, value) in SERVED.items()}
    assert {each.name for each in fields(LoadOptions)} - set(LOAD_NAMES) == {"max_queue", "verify"}
