"""Every option of pass-run changes what the command hands on, and every field of a batch line what
is asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click import Context
from recorded_arguments import REQUEST_VALUES, SAMPLING_VALUES, Calls, Case, Command, StandIn

from pass_runtime import GenerateOptions
from pass_runtime.cli.batch import Tally
from pass_runtime.cli.batch_session import LINE_FIELDS, line_options
from pass_runtime.cli.main import main

FILES = {"schema": "{}", "lark": 'start: "a"', "prompt": "from a file\n", "keys": "k\n"}
COMMAND_NAMES = main.list_commands(Context(main))
for name in COMMAND_NAMES:
    main.get_command(Context(main), name)  # imported before `prepare` replaces what they call


def prepare(calls: Calls) -> None:
    """Replace the functions that commands call, but not those that parse options."""
    session = StandIn(calls)
    calls.replace("pass_runtime.cli.flags.load", session)
    for name in ("print_json", "print_pieces", "print_summary"):
        calls.replace(f"pass_runtime.cli.main.{name}")
    calls.replace("pass_runtime.cli.tables.print_reasoning")
    calls.replace("pass_runtime.cli.chat_loop.ChatLoop", StandIn(calls, {"run": lambda: 0}))
    calls.replace("pass_runtime.cli.batch.read_manifest", recorded=False)
    calls.replace("pass_runtime.cli.batch.model_identity", "m", recorded=False)
    tally = Tally(results=2, failed=1)
    calls.replace(
        "pass_runtime.cli.batch.run_batch", lambda given: (given["open_session"](), tally)[1]
    )
    for name in ("run_bench", "measure_rows", "about"):
        calls.replace(f"pass_runtime.cli.bench.{name}", {})
    calls.replace("pass_runtime.cli.bench.show_report")
    manifest = SimpleNamespace(engines=())
    calls.replace("pass_runtime.cli.inspect_bundle.read_manifest", manifest, recorded=False)
    calls.replace("pass_runtime.cli.inspect_bundle.verify_files", recorded=False)
    calls.replace("pass_runtime.backends.ort.session.cpu_kernels", None)
    calls.replace("pass_runtime.cli.inspect_bundle.describe", {})
    calls.replace("pass_runtime.cli.inspect_bundle.find_captures", ("gpu", {}))
    for name in ("print_contents", "print_captures"):
        calls.replace(f"pass_runtime.cli.inspect_bundle.{name}")


def prepare_server(calls: Calls) -> None:
    pytest.importorskip("fastapi")
    prepare(calls)
    calls.replace("pass_server.server.run_server", lambda given: given["open_session"]())


CONSTRAINTS = {
    name: Case(words, expected={f"GenerateOptions.constraint.{name}": value})
    for name, words, value in (
        ("json_schema", "--json-schema schema", "{}"),
        ("json_object", "--json-object", True),
        ("regex", "--regex a+", "a+"),
        ("choice", "--choice a --choice b", ("a", "b")),
        ("grammar", "--grammar lark", 'start: "a"'),
    )
}
REQUEST = {**CONSTRAINTS, "plan": Case("--plan fused"), "logit_bias": Case("--logit-bias 5=-2")}
USER, SYSTEM = {"role": "user", "content": "a"}, {"role": "system", "content": "s"}
ROWS = "bundle --rows 1,2"
BASES = {"generate": "bundle -p a", "batch": "bundle requests results"}
CASES = {
    "generate": {
        **REQUEST,
        "prompt": Case("-p b", expected={"generate.0": "b"}),
        "prompt_file": Case("--prompt-file prompt", "bundle", {"generate.0": "from a file"}),
        "keep_newline": Case(None, "bundle --prompt-file prompt", {"generate.0": "from a file\n"}),
        "as_chat": Case(expected={"chat.0": [USER], "generate.0": None}),
        "system": Case("--system s", "bundle -p a --chat", {"chat.0": [SYSTEM, USER]}),
        "logprobs": Case(base="bundle -p a --json"),
        "as_json": Case(expected={"print_pieces.show_drafts": None}),
        "explain": Case(expected={"SamplingParams.temperature": 0.0}),
    },
    "chat": {**REQUEST, "context_overflow": Case(expected={"ChatLoop.drop": False})},
    "batch": {**REQUEST, "fail_on_error": Case(expected={"exit": 1})},
    "bench": {
        "batches": Case(
            "--batch 1,2",
            expected={"BenchOptions.batches": (1, 2), "LoadOptions.max_batch_size": 2},
        ),
        "rows": Case("--rows 1,2", expected={"RowsOptions.rows": (1, 2)}),
        "cached": Case(base=ROWS),
    },
    "inspect": {
        "as_json": Case(expected={"print_contents.contents": None}),
        "verify": Case(
            expected={"print_contents.contents": {"verified": True, "kernels": "onnxruntime"}}
        ),
        "device": Case("--device cuda", expected={"LoadOptions.device": "cuda"}),
        "max_batch_size": Case(base="bundle --device cuda"),
    },
    "serve": {
        "api_key_file": Case("--api-key-file keys", expected={"ServeOptions.keys": ("k",)}),
        "cors_origins": Case("--cors-origin '*'"),
    },
}
COMMANDS = {
    name: Command(
        main,
        name,
        BASES.get(name, "bundle"),
        prepare_server if name == "serve" else prepare,
        CASES.get(name, {}),
    )
    for name in COMMAND_NAMES
}


SCRIPTS = Path(__file__).parents[2] / "scripts"
RAY_CASES = CASES["serve"] | {
    "max_batch_size": Case(expected={"LoadOptions.max_batch_size": 12, "deployment.slots": 12}),
    "device": Case("--device cpu"),
    "bundle": Case(expected={"open_bundle.bundle": Path("other")}),
    "host": Case(expected={"start.http_options": {"host": "other", "port": 8000}}),
    "port": Case(expected={"start.http_options": {"host": "127.0.0.1", "port": 12}}),
    "replicas": Case(expected={"deployment.scaling": {"min_replicas": 12, "max_replicas": 12}}),
    "max_replicas": Case(expected={"deployment.scaling": {"min_replicas": 1, "max_replicas": 12}}),
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    for name, content in FILES.items():
        Path(name).write_text(content)


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for command in COMMANDS for name in COMMANDS[command].names()],
)
def test_an_option_changes_its_field(command, name):
    COMMANDS[command].assert_option_changes_its_field(name)


@pytest.mark.parametrize(
    "line",
    [
        "generate bundle -p a --keep-newline",
        "generate bundle -p a --json --show-drafts",
        "generate bundle -p a --system s",
        "generate bundle -p a --logprobs 1",
        "generate bundle -p a --plan ar --explain",
        f"bench {ROWS} --lookahead=1",
        f"bench {ROWS} --max-new-tokens 5",
        "inspect bundle --max-batch-size 3",
    ],
)
def test_an_option_without_effect_is_refused(line):
    command, _, arguments = line.partition(" ")
    COMMANDS[command].assert_refused(arguments)


VALUES = SAMPLING_VALUES | REQUEST_VALUES
VALUES |= {"max_new_tokens": 5, "logprobs": 2, "prompt_logprobs": 2}
VALUES |= {"json_schema": {}, "json_object": True, "regex": "a+", "choice": ["a"]}
VALUES |= {"grammar": 'start: "a"'}


@pytest.mark.parametrize("name", LINE_FIELDS[3:])
def test_a_field_of_a_batch_line_changes_its_request(name):
    options = line_options({"prompt": "a", name: VALUES[name]}, GenerateOptions(), 1)
    for part in (options, options.sampling, options.constraint):
        if hasattr(part, name):
            value = getattr(part, name)
    read = json.loads(json.dumps(value))  # its keys become text, its tuples lists
    assert (json.loads(read) if name == "json_schema" else read) == VALUES[name]


def test_a_stop_of_a_batch_line_may_be_one_string():
    assert line_options({"prompt": "a", "stop": "b"}, GenerateOptions(), 1).stop == ("b",)


def test_every_option_of_a_server_on_ray_changes_its_arguments(monkeypatch):
    pytest.importorskip("fastapi")
    ray = ModuleType("ray")
    ray.init = ray.shutdown = lambda **_: None
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.syspath_prepend(SCRIPTS)
    import on_ray

    def prepare_ray(calls: Calls) -> None:
        ray.serve = StandIn(calls)
        calls.replace("on_ray.deployment", StandIn(calls))
        calls.replace("on_ray.check_exposure")
        calls.replace("pass_runtime.cli.flags.open_bundle", StandIn(calls))

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    command = Command(on_ray.main, "serve", "bundle", prepare_ray, RAY_CASES)
    for name in command.names():
        command.assert_option_changes_its_field(name)
