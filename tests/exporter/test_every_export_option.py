"""Every option of pass-export and pass-train changes what the command hands on to the calls that do
its work."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from recorded_arguments import Calls, Case, Command, StandIn

from pass_exporter.cli import main as export_main
from pass_exporter.triton import RepositoryConfig, config_pbtxt
from pass_runtime import LoadOptions, options_of
from pass_server.triton.config import LIMIT_PARAMETERS, LOAD_PARAMETERS, PARAMETERS, read_settings
from pass_trainer.cli import main as train_main

EXPORT, TRAIN = "--model m --dtype fp16", "--model m -o out"
NUMBERS = (
    *("max_batch_size", "max_queue", "max_prompt_tokens", "max_output_tokens", "request_seconds"),
    *("drain_seconds", "threads", "speculative_max_concurrency"),
)
SERVED: dict[str, Any] = dict.fromkeys(NUMBERS, 3) | {
    "device": "cpu",
    "capacity": 64,
    "reuse_prefix": True,
    "prefix_cache": False,
    "logprobs_mode": "processed",
}
"""Values of every parameter of a Triton model."""


def served_case(name: str, value: Any) -> Case:
    flag = name.replace("_", "-")
    words = {True: f"--{flag}", False: f"--no-{flag}"}.get(value, f"--{flag} {value}")
    return Case(words, expected={"RepositoryConfig.parameters": {name: value}})


def prepare(calls: Calls) -> None:
    for name in ("_export", "_build", "_check_engine", "write_model"):
        calls.replace(f"pass_exporter.cli.{name}")
    calls.replace("pass_trainer.run.run", StandIn(calls, {"agreement": None, "weights": "w"}))
    calls.replace("pass_trainer.evaluation.evaluate.evaluate", {})
    calls.replace("pass_trainer.config.read_prompt_set", [], recorded=False)
    calls.replace("pass_trainer.evaluation.card.check_recordable", recorded=False)
    calls.replace("pass_trainer.evaluation.card.write_results")
    for name in ("_print_agreement", "_print_evaluation"):
        calls.replace(f"pass_trainer.cli.{name}", recorded=False)
    calls.replace("pass_trainer.cli.to_json", "{}")


def beside(flags: str, names: Iterable[str]) -> dict[str, Case]:
    return {name: Case(base=flags) for name in names}


ENGINE_OPTIONS = (
    *("max_batch_size", "max_seq_len", "capacity", "workspace", "timing_cache"),
    *("compute_capability", "device_memory"),
)
PREFILL_WIDTHS = "--prefill-widths 8,4"
COMMANDS = [
    Command(
        export_main,
        "",
        EXPORT,
        prepare,
        {
            **beside(f"{EXPORT} --engine tensorrt", (*ENGINE_OPTIONS, "force")),
            **beside(f"{EXPORT} --weights int4", ["calibrate", "zero_points"]),
            **beside(f"{EXPORT} --verify text", ["max_perplexity_ratio"]),
            **beside("--model m", ["target"]),
            "prefill_widths": Case(PREFILL_WIDTHS, f"{EXPORT} --engine tensorrt"),
            "weights": Case("--weights int4"),
            "engine": Case(expected={"EngineConfig.engine": "tensorrt"}),
        },
    ),
    Command(
        export_main,
        "build",
        "bundle --engine tensorrt",
        prepare,
        {
            "prefill_widths": Case(PREFILL_WIDTHS),
            "engine": Case("--engine tensorrt-rtx"),
        },
    ),
    Command(
        export_main,
        "triton",
        "bundle -o out",
        prepare,
        {
            **{name: served_case(name, value) for name, value in SERVED.items()},
            "text": Case("--tokens", expected={"RepositoryConfig.tokens": True}),
            "reference": Case("--copy", expected={"RepositoryConfig.copy": True}),
        },
    ),
    Command(
        train_main,
        "",
        TRAIN,
        prepare,
        {
            **beside(f"{TRAIN} --adapter lora", ["rank", "adapter_from"]),
            **beside(f"{TRAIN} --head", ["head_rank", "head_width"]),
            "start": Case("--start weights"),
            "minutes": Case(expected={"TrainConfig.minutes": 0.5}),
            "sequence_length": Case(
                "--sequence-length 99", expected={"TrainConfig.recipe.sequence_length": 99}
            ),
            "prompt_tokens": Case(
                "--prompt-tokens 5 6",
                f"{TRAIN} --data text",
                {"TrainConfig.recipe.prompt_tokens": (5, 6)},
            ),
            "chat_share": Case(
                "--chat-share 0.5", f"{TRAIN} --data text", {"TrainConfig.recipe.chat_share": 0.5}
            ),
            "temperatures": Case(
                "--temperatures 0,2", expected={"TrainConfig.recipe.temperatures": (0.0, 2.0)}
            ),
        },
    ),
    Command(
        train_main,
        "evaluate",
        "weights --model m",
        prepare,
        {
            "kinds": Case("--kinds code", expected={"EvaluateConfig.kinds": ("code",)}),
            "temperatures": Case(
                "--temperatures 0,2", expected={"EvaluateConfig.temperatures": (0.0, 2.0)}
            ),
            "record": Case(expected={"write_results.report": ANY}),
            "as_json": Case(expected={"to_json.value": ANY}),
        },
    ),
]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("weights").touch()


def test_every_command_is_here():
    named = {(main, name) for main in (export_main, train_main) for name in ("", *main.commands)}
    assert named == {(command.main, command.words) for command in COMMANDS}


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for command in COMMANDS for name in command.names()],
    ids=lambda value: value if isinstance(value, str) else f"{value.main.name} {value.words}",
)
def test_an_option_changes_its_field(command: Command, name: str):
    command.assert_option_changes_its_field(name)


@pytest.mark.parametrize("name", [*ENGINE_OPTIONS, "prefill_widths"])
def test_options_of_engines_need_an_engine(name: str):
    export = COMMANDS[0]
    export.assert_refused(f"{EXPORT} {export.line_words(name)}")


@pytest.mark.parametrize(
    "flags",
    [
        *("--rank 2", "--adapter-from 2", "--head-rank 2", "--head-width 2"),
        *("--prompt-tokens 5 6", "--chat-share 0.5"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(flags: str):
    COMMANDS[3].assert_refused(f"{TRAIN} {flags}")


def test_triton_reads_every_parameter_that_is_written():
    assert SERVED.keys() == PARAMETERS.keys()
    config = RepositoryConfig(Path("bundle"), Path("out"), parameters=SERVED)
    pairs = re.findall(r'key: "(\w+)" value { string_value: "(.*)" }', config_pbtxt("m", config))
    settings = read_settings(dict(pairs))
    found = {name: getattr(settings.load, name) for name in LOAD_PARAMETERS}
    found |= {name: getattr(settings.serve, name) for name in LIMIT_PARAMETERS} | {
        "drain_seconds": settings.drain_seconds
    }
    assert found == SERVED
    assert options_of(LoadOptions).keys() - LOAD_PARAMETERS == {"max_queue", "verify"}
