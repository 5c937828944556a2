"""Nothing that we start reports its use to ONNX Runtime's maker: it writes no identity into the
home directory, and looks no host up."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from empty_home import ROOT, SETTING, Home

OPEN_AND_WAIT = (
    "import sys, time; from pass_runtime import load; session = load(sys.argv[1], 'cpu');"
    " print('open', flush=True); time.sleep(1e6)"
)
TRITON = (
    "import sys; sys.path += ['tests/serve']; from pathlib import Path; import fake_triton;"
    "\nwith fake_triton.model_of(Path(sys.argv[1]), Path(sys.argv[2])) as model: model.is_ready()"
)
ENTRY_POINTS = {
    "import": ["-c", "import sys, pass_runtime; pass_runtime.load(sys.argv[1], 'cpu')", "BUNDLE"],
    "pass-run": ["-m", "pass_runtime", "generate", "BUNDLE", "-p", "a", "--max-new-tokens", "2"],
    "pass-export": ["-m", "pass_exporter", "--model", "MODEL", "--lookahead", "1", "-o", "OUTPUT"],
    "pass-train": ["-c", "import pass_trainer.cli, onnxruntime; onnxruntime.SessionOptions()"],
    "Triton": ["-c", TRITON, "BUNDLE", "OUTPUT"],
    "the minimal driver": ["examples/minimal_driver.py", "BUNDLE", "ar", "2", "5", "6"],
}
"""The arguments with which Python starts them."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("cc") or shutil.which("c++")) is None:
        pytest.skip("NOT TESTED: look-ups of hosts, which need a C compiler")
    path = tmp_path_factory.mktemp("library") / "no_network.so"
    source = Path(__file__).with_name("no_network.c")
    subprocess.run([compiler, "-x", "c", source, "-shared", "-fPIC", "-o", path], check=True)
    return path


@pytest.fixture(scope="module")
def reporting(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = Home(tmp_path_factory.mktemp("reporting"))
    home.stderr_of(command("import", BUNDLE=tiny_bundle), **{SETTING: "0"})
    if not any("Microsoft" in str(path) for path in home.content):
        pytest.skip("NOT TESTED: this ONNX Runtime has no telemetry to turn off")


def command(name: str, **values: object) -> list[object]:
    return [sys.executable, *(values.get(each, each) for each in ENTRY_POINTS[name])]


@pytest.mark.slow
@pytest.mark.usefixtures("reporting")
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_an_entry_point_leaves_the_home_directory_empty(name, tiny_bundle, tiny_model, tmp_path):
    home = Home(tmp_path)
    home.stderr_of(command(name, BUNDLE=tiny_bundle, MODEL=tiny_model, OUTPUT=tmp_path / "output"))
    assert home.content == []


@pytest.mark.slow
@pytest.mark.usefixtures("reporting")
def test_an_open_session_looks_up_no_host(tiny_bundle: Path, tmp_path: Path, library: Path):
    """A session beside it, whose user wants telemetry, shows when it would have."""
    quiet, wanted = (Home(tmp_path / name, library) for name in ("quiet", "wanted"))
    processes = [
        home.start([sys.executable, "-c", OPEN_AND_WAIT, tiny_bundle], **setting)
        for home, setting in ((quiet, {}), (wanted, {SETTING: "0"}))
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "open\n"
        while not wanted.lookups.exists():
            assert all(process.poll() is None for process in processes)
            time.sleep(0.1)
        assert "microsoft" in wanted.lookups.read_text()
        assert not quiet.lookups.exists() and quiet.content == []
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("value", [None, ""])
def test_a_home_that_cannot_be_written_is_no_reason_to_warn(tiny_bundle, tmp_path, value):
    home = Home(tmp_path)
    environment = {"HOME": "/proc/none"} | ({} if value is None else {SETTING: value})
    assert home.stderr_of(command("import", BUNDLE=tiny_bundle), **environment) == ""


def first_import(source: str, package: str) -> int:
    """Return where a file first imports a package, functions included; -1 if it never does."""
    found = re.search(rf'^ *(from|import) {package}\b|import_module\("{package}\b', source, re.M)
    return -1 if found is None else found.start()


def test_who_imports_onnx_runtime_has_turned_its_telemetry_off():
    """An import of pass_runtime does so, which comes first in files outside it."""
    importing = []
    for folder in ("exporter", "runtime/pass_server", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            place = first_import(source, r"onnxruntime(_genai)?")
            importing += [path] if place >= 0 else []
            assert place < 0 or 0 <= first_import(source, "pass_runtime") < place, path
    assert importing
