"""Every option of scripts/serve_ray.py changes arguments of the calls that the script makes. Ray is
a fake."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from recorded_arguments import ANYTHING_ELSE, Calls, Case, StandIn, changes, option_names
from server_cases import SERVER_CASES

from pass_server.flags import server_options
from pass_server.serve_options import ServeOptions

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_ray.py"
LOADED = {
    "device": (["--device", "cpu"], {"device": "cpu"}),
    "threads": (["--threads", 2], {"threads": 2}),
    "capacity": (["--capacity", 64], {"capacity": 64}),
    "verify": (["--trust-bundle"], {"verify": False}),
}
"""Options that set fields of LoadOptions: arguments of the command line, and the fields."""
CASES = {
    **SERVER_CASES,
    **{
        name: Case(arguments, {f"LoadOptions.{key}": value for key, value in values.items()})
        for name, (arguments, values) in LOADED.items()
    },
    "max_batch_size": Case(
        ["--max-batch-size", 3], {"LoadOptions.max_batch_size": 3, "deployment.slots": 3}
    ),
    "bundle": Case([], {"deployment.bundle": Path("/other"), ANYTHING_ELSE: None}, ["/other"]),
    "host": Case(
        ["--host", "0.0.0.0"],
        {"check_exposure.host": "0.0.0.0", "start.http_options": {"host": "0.0.0.0", "port": 8000}},
    ),
    "port": Case(["--port", 5], {"start.http_options": {"host": "127.0.0.1", "port": 5}}),
    "replicas": Case(
        ["--replicas", 2], {"deployment.scaling": {"min_replicas": 2, "max_replicas": 2}}
    ),
    "max_replicas": Case(
        ["--max-replicas", 2], {"deployment.scaling": {"min_replicas": 1, "max_replicas": 2}}
    ),
}


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_file_location("serve_ray", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["serve_ray"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["serve_ray"]


@pytest.fixture(autouse=True)
def keys_and_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a key file, and install a fake Ray. A script that waits is ended as by Ctrl-C."""

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("k\n")
    ray: Any = ModuleType("ray")
    ray.init = ray.shutdown = lambda **_: None
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("time.sleep", interrupt)
    monkeypatch.setattr("signal.signal", lambda *_: None)


def prepare(calls: Calls) -> None:
    """Replace what the script calls by stand-ins that record their arguments."""
    ray: Any = sys.modules["ray"]
    ray.serve = StandIn(calls)
    calls.replace("serve_ray.deployment", StandIn(calls))
    calls.replace("serve_ray.check_exposure")
    calls.replace("pass_runtime.cli.flags.open_bundle", StandIn(calls))


def test_there_is_a_case_for_every_option(script):
    assert set(CASES) == option_names(script.main)


def test_every_field_of_serve_options_has_a_flag():
    """Except `keys`, which are read from --api-key-file, and `max_sequences`."""
    names = {field.name for field in fields(ServeOptions)}
    flags = option_names(click.command()(server_options(lambda: None)))
    assert names - flags == {"keys", "max_sequences"}


@pytest.mark.parametrize("option", CASES)
def test_an_option_changes_only_its_own_arguments(script, option):
    assert changes(script.main, [], ["bundle"], CASES[option], prepare) == CASES[option].expected
