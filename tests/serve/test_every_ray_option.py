"""Every option of `scripts/on_ray.py serve` changes arguments of its calls. Ray is a fake."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from recorded_arguments import Calls, Case, Command, StandIn

SCRIPT = Path(__file__).parents[2] / "scripts" / "on_ray.py"
CASES = {
    "api_key_file": Case("--api-key-file keys", expected={"ServeOptions.keys": ("k",)}),
    "cors_origins": Case("--cors-origin '*'"),
    "max_batch_size": Case(expected={"LoadOptions.max_batch_size": 12, "deployment.slots": 12}),
    "device": Case("--device cpu"),
    "bundle": Case(expected={"open_bundle.bundle": Path("other")}),
    "host": Case(expected={"start.http_options": {"host": "other", "port": 8000}}),
    "port": Case(expected={"start.http_options": {"host": "127.0.0.1", "port": 12}}),
    "replicas": Case(expected={"deployment.scaling": {"min_replicas": 12, "max_replicas": 12}}),
    "max_replicas": Case(expected={"deployment.scaling": {"min_replicas": 1, "max_replicas": 12}}),
}


def prepare(calls: Calls) -> None:
    """Replace what the script calls by stand-ins that record their arguments."""
    ray: Any = sys.modules["ray"]
    ray.serve = StandIn(calls)
    calls.replace("on_ray.deployment", StandIn(calls))
    calls.replace("on_ray.check_exposure")
    calls.replace("pass_runtime.cli.flags.open_bundle", StandIn(calls))


def test_every_option_changes_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = spec_from_file_location("on_ray", SCRIPT)
    assert spec is not None and spec.loader is not None
    script: Any = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "on_ray", script)
    spec.loader.exec_module(script)

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("k\n")
    ray: Any = ModuleType("ray")
    ray.init = ray.shutdown = lambda **_: None
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("time.sleep", interrupt)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    command = Command(script.main, "serve", "bundle", prepare, CASES)
    for name in command.names():
        command.assert_option_changes_its_field(name)
