"""Every option of pass-run changes arguments of the functions that do the command's work.

A `Case` (recorded_arguments.py) names an option's words and the arguments that they change, and no
others: `{"LoadOptions.threads": 2}`. The functions are replaced by stand-ins that record their
arguments.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click import Context
from click.testing import CliRunner
from recorded_arguments import ANYTHING_ELSE, Calls, Case, StandIn, changes, option_names
from server_cases import SERVER_CASES

from pass_runtime.cli.batch import Tally
from pass_runtime.cli.flags import CONSTRAINT_FIELDS
from pass_runtime.cli.main import main
from pass_runtime.cli.request_line import BatchRequest
from pass_runtime.options import GenerateOptions

FILES = {  # name -> content
    "schema": "{}",
    "lark": 'start: "a"',
    "prompt": "from a file\n",
    "prompts": '{"prompt": "b"}\n',
    "keys": "k\n",
}
BUNDLE = "bundle"
SAMPLED = {
    "temperature": Case(["--temperature", 0.5], {"temperature": 0.5}),
    "top_k": Case(["--top-k", 3], {"top_k": 3}),
    "top_p": Case(["--top-p", 0.5], {"top_p": 0.5}),
    "min_p": Case(["--min-p", 0.1], {"min_p": 0.1}),
    "seed": Case(["--seed", 7], {"seed": 7}),
}
PENALIZED = {
    "presence_penalty": Case(["--presence-penalty", 0.5], {"presence_penalty": 0.5}),
    "frequency_penalty": Case(["--frequency-penalty", 0.5], {"frequency_penalty": 0.5}),
    "repetition_penalty": Case(["--repetition-penalty", 1.5], {"repetition_penalty": 1.5}),
    "logit_bias": Case(["--logit-bias", "5=-2"], {"logit_bias": {5: -2.0}}),
}
NO_CONSTRAINT = {"json_object": False, "choice": ()}
CONSTRAINED = {  # field -> the option's words, and the fields that it sets
    "json_schema": (["--json-schema", "schema"], {"json_schema": "{}"}),
    "json_object": (["--json-object"], {"json_object": True}),
    "regex": (["--regex", "a+"], {"regex": "a+"}),
    "choice": (["--choice", "a", "--choice", "b"], {"choice": ("a", "b")}),
    "grammar": (["--grammar", "lark"], {"grammar": 'start: "a"'}),
}
GENERATED = {
    "max_new_tokens": Case(["--max-new-tokens", 5], {"max_new_tokens": 5}),
    "plan": Case(["--plan", "fused"], {"plan": "fused"}),
    "draft": Case(["--draft", "ngram"], {"draft": "ngram"}),
    "lookahead": Case(["--lookahead", 1], {"lookahead": 1}),
    "stop": Case(["--stop", "a", "--stop", "b"], {"stop": ("a", "b")}),
    "stop_token_ids": Case(["--stop-token-id", 5], {"stop_token_ids": (5,)}),
    "ignore_eos": Case(["--ignore-eos"], {"ignore_eos": True}),
    "min_tokens": Case(["--min-tokens", 2], {"min_tokens": 2}),
    "bad_words": Case(["--bad-word", "a"], {"bad_words": ("a",)}),
    "allowed_token_ids": Case(["--allowed-token-id", 5], {"allowed_token_ids": (5,)}),
}
ENGINE = {
    "device": Case(["--device", "cpu"], {"device": "cpu"}),
    "threads": Case(["--threads", 2], {"threads": 2}),
    "capacity": Case(["--capacity", 64], {"capacity": 64}),
    "verify": Case(["--trust-bundle"], {"verify": False}),
}
LIMITS = {
    "max_batch_size": Case(["--max-batch-size", 3], {"max_batch_size": 3}),
    "speculative_max_concurrency": Case(
        ["--speculative-max-concurrency", 2], {"speculative_max_concurrency": 2}
    ),
}
NO_PREFIX_CACHE = {"prefix_cache": Case(["--no-prefix-cache"], {"prefix_cache": False})}
LOGPROBS_MODE = {
    "logprobs_mode": Case(["--logprobs-mode", "processed"], {"logprobs_mode": "processed"})
}


def under(prefix: str, cases: dict[str, Case]) -> dict[str, Case]:
    """Return the cases with `prefix.` before every name that they expect."""
    return {
        name: dataclasses.replace(
            case, expected={f"{prefix}.{key}": value for key, value in case.expected.items()}
        )
        for name, case in cases.items()
    }


GENERATION = {
    **under("GenerateOptions", GENERATED),
    **under("GenerateOptions.sampling", SAMPLED | PENALIZED),
    # Without such an option there is no constraint at all, so that all its fields change.
    **under(
        "GenerateOptions.constraint",
        {
            name: Case(words, NO_CONSTRAINT | fields)
            for name, (words, fields) in CONSTRAINED.items()
        },
    ),
}
OPENED = under("LoadOptions", ENGINE)
PROMPT = [BUNDLE, "-p", "a"]
ROWS = [BUNDLE, "--rows", "1,2"]
COMMANDS: dict[str, tuple[list[Any], dict[str, Case]]] = {
    "generate": (
        PROMPT,
        {
            **GENERATION,
            **OPENED,
            **under("LoadOptions", LOGPROBS_MODE),
            "bundle": Case([], {"load.bundle": Path("other")}, ["other", "-p", "a"]),
            "prompt": Case(["-p", "b"], {"generate.0": "b"}),
            "prompt_file": Case(
                ["--prompt-file", "prompt"], {"generate.0": "from a file"}, [BUNDLE]
            ),
            "keep_newline": Case(
                ["--keep-newline"],
                {"generate.0": "from a file\n"},
                [BUNDLE, "--prompt-file", "prompt"],
            ),
            "as_chat": Case(
                ["--chat"], {"chat.0": [{"role": "user", "content": "a"}], "generate.0": None}
            ),
            "system": Case(
                ["--system", "s"],
                {"chat.0": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
                [*PROMPT, "--chat"],
            ),
            "logprobs": Case(
                ["--logprobs", 2], {"GenerateOptions.logprobs": 2}, [*PROMPT, "--json"]
            ),
            "as_json": Case(
                ["--json"], {"print_pieces.show_drafts": None, "print_summary.show_drafts": None}
            ),
            "show_drafts": Case(
                ["--show-drafts"],
                {"print_pieces.show_drafts": True, "print_summary.show_drafts": True},
            ),
            "explain": Case(
                ["--explain"], {"SamplingParams.temperature": 0.0, ANYTHING_ELSE: None}
            ),
        },
    ),
    "chat": (
        [BUNDLE],
        {
            **GENERATION,
            **OPENED,
            **under("LoadOptions", NO_PREFIX_CACHE),
            "bundle": Case([], {"load.bundle": Path("other")}, ["other"]),
            "system": Case(["--system", "s"], {"Conversation.system": "s"}),
            "context_overflow": Case(["--context-overflow", "stop"], {"ChatLoop.drop": False}),
            "show_drafts": Case(["--show-drafts"], {"ChatLoop.show_drafts": True}),
        },
    ),
    "batch": (
        [BUNDLE, "requests", "results"],
        {
            **GENERATION,
            **OPENED,
            **under("LoadOptions", LIMITS | LOGPROBS_MODE | NO_PREFIX_CACHE),
            "bundle": Case(
                [],
                {"load.bundle": Path("other"), ANYTHING_ELSE: None},
                ["other", "requests", "results"],
            ),
            "requests": Case(
                [], {"run_batch.requests": Path("other")}, [BUNDLE, "other", "results"]
            ),
            "results": Case(
                [], {"run_batch.results": Path("other")}, [BUNDLE, "requests", "other"]
            ),
            "logprobs": Case(["--logprobs", 2], {"GenerateOptions.logprobs": 2}),
            "retry_failed": Case(["--retry-failed"], {"run_batch.retry_failed": True}),
            "fail_on_error": Case(["--fail-on-error"], {"exit": 1}),
        },
    ),
    "serve": (
        [BUNDLE],
        {
            **OPENED,
            **SERVER_CASES,
            **under("LoadOptions", {"max_batch_size": LIMITS["max_batch_size"]}),
            "bundle": Case([], {"load.bundle": Path("other")}, ["other"]),
            "host": Case(
                ["--host", "0.0.0.0"], {"listen.host": "0.0.0.0", "check_exposure.host": "0.0.0.0"}
            ),
            "port": Case(["--port", 5], {"listen.port": 5}),
            "max_connections": Case(["--max-connections", 5], {"HttpServer.max_connections": 5}),
            "drain_seconds": Case(["--drain-seconds", 5], {"_serve.drain_seconds": 5.0}),
            "client_seconds": Case(
                ["--client-seconds", 5],
                {"ServeOptions.client_seconds": 5.0, "HttpServer.client_seconds": 5.0},
            ),
        },
    ),
    "bench": (
        [BUNDLE],
        {
            **OPENED,
            **under("BenchOptions.sampling", SAMPLED),
            "bundle": Case([], {"load.bundle": Path("other")}, ["other"]),
            "prompts": Case(["-p", "a"], {"BenchOptions.prompts": ("a",)}),
            "prompt_file": Case(
                ["--prompt-file", "prompts"], {"BenchOptions.prompt_file": Path("prompts")}
            ),
            "max_new_tokens": Case(["--max-new-tokens", 5], {"BenchOptions.max_new_tokens": 5}),
            "plans": Case(["--plan", "ar"], {"BenchOptions.plans": ("ar",)}),
            "drafts": Case(["--draft", "ngram"], {"BenchOptions.drafts": ("ngram",)}),
            "lookahead": Case(["--lookahead", 1], {"BenchOptions.lookahead": (1,)}),
            "batches": Case(
                ["--batch", "1,2"],
                {"BenchOptions.batches": (1, 2), "LoadOptions.max_batch_size": 2},
            ),
            "rows": Case(["--rows", "1,2"], {"RowsOptions.rows": (1, 2), ANYTHING_ELSE: None}),
            "cached": Case(["--cached", 9], {"RowsOptions.cached": 9}, ROWS),
            "repeat": Case(["--repeat", 9], {"BenchOptions.repeat": 9}),
            "breakdown": Case(["--breakdown"], {"BenchOptions.breakdown": True}),
            "as_json": Case(["--json"], {"show_report.as_json": True}),
            "output": Case(["-o", "out"], {"show_report.output": Path("out")}),
        },
    ),
    "inspect": (
        [BUNDLE],
        {
            "bundle": Case([], {"run_inspect.bundle": Path("other")}, ["other"]),
            "as_json": Case(["--json"], {"run_inspect.as_json": True}),
            "verify": Case(["--verify"], {"run_inspect.verify": True}),
            "device": Case(["--device", "cuda"], {"run_inspect.device": "cuda"}),
            "max_batch_size": Case(
                ["--max-batch-size", 3],
                {"run_inspect.max_batch_size": 3},
                [BUNDLE, "--device", "cuda"],
            ),
        },
    ),
}
"""By command: its shortest line, and a case for each of its options."""
CASES = [(command, option) for command, (_, cases) in COMMANDS.items() for option in cases]


for module in ("batch", "bench_rows", "chat_loop", "tables", "inspect_bundle"):
    import_module(f"pass_runtime.cli.{module}")  # before `prepare` replaces what they import


def prepare(calls: Calls) -> None:
    """Replace the functions that commands call, but not those that parse options."""
    session = StandIn(calls)
    session.chat_template = None
    calls.replace("pass_runtime.cli.flags.load", session)
    for name in ("print_json", "print_pieces", "print_summary"):
        calls.replace(f"pass_runtime.cli.main.{name}")
    calls.replace("pass_runtime.cli.tables.print_reasoning")
    calls.replace("pass_runtime.cli.chat_loop.ChatLoop", StandIn(calls, {"run": lambda: 0}))
    calls.replace("pass_runtime.bundle.read.read_manifest")
    calls.replace("pass_runtime.cli.batch.model_identity", "m")
    tally = Tally(results=2, failed=1)
    calls.replace(
        "pass_runtime.cli.batch.run_batch", lambda given: (given["open_session"](), tally)[1]
    )
    for name in ("bench.run_bench", "bench_rows.measure_rows", "bench.about"):
        calls.replace(f"pass_runtime.cli.{name}", {})
    calls.replace("pass_runtime.cli.bench.show_report")
    calls.replace("pass_runtime.cli.inspect_bundle.run_inspect")


async def serve_nothing() -> None:
    pass


def prepare_server(calls: Calls) -> None:
    import_module("pass_server.server")
    prepare(calls)
    listening = StandIn(calls, {"getsockname": lambda: ("h", 1)})
    calls.replace("pass_server.server.listen", listening)
    config = SimpleNamespace(get_loop_factory=lambda: None)
    calls.replace("pass_server.server.HttpServer", SimpleNamespace(config=config))
    calls.replace("pass_server.server._serve", lambda _: serve_nothing())
    # `answering` needs a real listener.
    calls.replace("pass_server.server.answering", nullcontext(), recorded=False)
    app = SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(model="m")))
    calls.replace("pass_server.server.make_app", app)
    calls.replace("pass_server.server.check_exposure")


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)
    for name, content in FILES.items():
        Path(name).write_text(content)


@pytest.mark.parametrize("command", main.list_commands(Context(main)))
def test_there_is_a_case_for_every_option(command):
    assert set(COMMANDS[command][1]) == option_names(main.get_command(Context(main), command))


@pytest.mark.parametrize(("command", "option"), CASES)
def test_an_option_changes_only_its_own_fields(command, option):
    if command == "serve":
        pytest.importorskip("fastapi")
    base, cases = COMMANDS[command]
    prepared = prepare_server if command == "serve" else prepare
    assert changes(main, [command], base, cases[option], prepared) == cases[option].expected


LINES_WITHOUT_EFFECT = [
    ["generate", *PROMPT, "--keep-newline"],
    ["generate", *PROMPT, "--json", "--show-drafts"],
    ["generate", *PROMPT, "--system", "s"],
    ["generate", *PROMPT, "--logprobs", 1],
    ["generate", *PROMPT, "--plan", "ar", "--explain"],
    ["bench", BUNDLE, "--cached", 9],
    *(["bench", *ROWS, flag] for flag in ("--plan=ar", "--lookahead=1", "--breakdown")),
    ["bench", *ROWS, "--max-new-tokens", 5],
    ["inspect", BUNDLE, "--max-batch-size", 3],
]


@pytest.mark.parametrize("line", LINES_WITHOUT_EFFECT, ids=lambda line: " ".join(map(str, line)))
def test_an_option_without_effect_is_refused(line, monkeypatch):
    calls = Calls(monkeypatch)
    prepare(calls)
    result = CliRunner().invoke(main, [str(word) for word in line])
    assert result.exit_code == 2
    assert "--" in result.stderr


VALUES = {
    **{name: case.expected[name] for name, case in {**GENERATED, **SAMPLED, **PENALIZED}.items()},
    "logprobs": 2,
    "prompt_logprobs": 2,
    "cache_salt": "s",
    "json_schema": {},
    "json_object": True,
    "regex": "a+",
    "choice": ["a"],
    "grammar": 'start: "a"',
}
"""For every field of a request, a value that is not its default."""


@pytest.mark.parametrize(
    "name", sorted(BatchRequest.model_fields.keys() - {"id", "prompt", "messages"})
)
def test_a_field_of_a_batch_line_changes_its_request(name):
    expected = listed(VALUES[name])
    in_json = {"5": -2.0} if name == "logit_bias" else expected  # keys of JSON are text
    line = {"prompt": "a", "plan": "ar"} | {name: in_json}
    options = BatchRequest.model_validate(line).options(GenerateOptions(), 1)
    assert options != BatchRequest(prompt="a", plan="ar").options(GenerateOptions(), 1)
    part = options if hasattr(options, name) else options.sampling
    value = getattr(options.constraint if name in CONSTRAINT_FIELDS else part, name)
    assert (json.loads(value) if name == "json_schema" else listed(value)) == expected


def listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
