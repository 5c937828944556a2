"""Every option of scripts/serve_ray.py changes what the script hands on. Ray itself is replaced."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from handed_on import ANYTHING_ELSE, Calls, Case, StandIn, changes, option_names

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_ray.py"
LOADED = {
    "device": (["--device", "cpu"], {"device": "cpu"}),
    "threads": (["--threads", 2], {"threads": 2}),
    "capacity": (["--capacity", 64], {"capacity": 64}),
    "trust_bundle": (["--trust-bundle"], {"verify": False}),
    "no_weight_cache": (["--no-weight-cache"], {"weight_cache": False}),
    "no_prefix_cache": (["--no-prefix-cache"], {"prefix_cache": False}),
}
CASES = {
    **{
        name: Case(given, {f"LoadOptions.{key}": value for key, value in found.items()})
        for name, (given, found) in LOADED.items()
    },
    "max_batch_size": Case(["--max-batch-size", 3], {"LoadOptions.max_batch_size": 3, "deployment.slots": 3}),
    "bundle": Case([], {"deployment.bundle": Path("/other"), ANYTHING_ELSE: None}, ["/other"]),
    "host": Case(
        ["--host", "0.0.0.0"],
        {"check_exposure.host": "0.0.0.0", "start.http_options": {"host": "0.0.0.0", "port": 8000}},
    ),
    "port": Case(["--port", 5], {"start.http_options": {"host": "127.0.0.1", "port": 5}}),
    "api_key_file": Case(["--api-key-file", "keys"], {"ServeOptions.keys": ("k",), "check_exposure.keys": ("k",)}),
    "allow_no_key": Case(["--allow-no-key"], {"check_exposure.allow_no_key": True}),
    "model_name": Case(["--served-model-name", "m"], {"ServeOptions.model_name": "m"}),
    "replicas": Case(["--replicas", 2], {"deployment.scaling": {"min_replicas": 2, "max_replicas": 2}}),
    "max_replicas": Case(["--max-replicas", 2], {"deployment.scaling": {"min_replicas": 1, "max_replicas": 2}}),
    "max_queue": Case(["--max-queue", 5], {"ServeOptions.max_queue": 5}),
    "no_client_plan": Case(["--no-client-plan"], {"ServeOptions.client_plans": False}),
    "no_page": Case(["--no-page"], {"ServeOptions.page": False}),
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
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key file, and a Ray that Ctrl-C ends at once."""

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("k\n")
    ray: Any = ModuleType("ray")
    ray.init = ray.shutdown = lambda **_: None
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("time.sleep", interrupt)
    monkeypatch.setattr("signal.signal", lambda *_: None)


def prepare(calls: Calls) -> None:
    ray: Any = sys.modules["ray"]
    ray.serve = StandIn(calls)
    calls.replace("serve_ray.deployment", StandIn(calls))
    calls.replace("serve_ray.check_exposure")
    calls.replace("pass_runtime.cli.flags.open_bundle", StandIn(calls))


def test_there_is_a_case_for_every_option(script):
    assert set(CASES) == option_names(script.main)


@pytest.mark.parametrize("option", CASES)
def test_an_option_changes_what_it_is_for(script, option):
    assert changes(script.main, [], ["bundle"], CASES[option], prepare) == CASES[option].expected
