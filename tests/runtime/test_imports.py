from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pass_runtime

FRAMEWORKS = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors"}
FORBIDDEN = FRAMEWORKS | {"pass_exporter"}
ROOT = Path(pass_runtime.__file__).parent
SERVER = ROOT.parent / "pass_server"
SOURCES = sorted(ROOT.rglob("*.py"))
SERVER_SOURCES = sorted(SERVER.rglob("*.py"))
EVERYWHERE = {"errors", "files", "packages"}
PUBLIC = {"options", "generation", "resolver", "session"}
SESSION = {"bundle", "backends", "tuning", "decode", "text", *PUBLIC}
ROOMS = {  # what each room of docs/architecture.md may import, besides EVERYWHERE
    "bundle": set(),
    "backends": {"bundle", "options"},  # LoadOptions, for annotations alone
    "tuning": {"bundle", "backends"},
    "decode": {"bundle", "backends", "tuning", "text"},
    "text": {"bundle"},
    "commands": set(),
    **dict.fromkeys([*PUBLIC, "measuring"], SESSION),
    "cli": {*SESSION, "measuring", "commands"},
}


def imported_modules(source: str) -> set[str]:
    """Return the top-level packages that `source` imports anywhere, in functions too."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return packages


def loaded_by(module: str) -> set[str]:
    """Return the top-level packages that a process has loaded after `import module`."""
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["", ".cli.main", ".measuring.real_use", ".measuring.lossless", ".cli.batch", ".cli.bench"],
)
def test_importing_the_runtime_imports_no_framework(module):
    loaded = loaded_by(f"pass_runtime{module}")
    assert "pass_runtime" in loaded
    assert not loaded & FORBIDDEN


@pytest.mark.parametrize("path", [*SOURCES, *SERVER_SOURCES], ids=lambda path: path.name)
def test_no_source_imports_a_framework(path):
    assert not imported_modules(path.read_text(encoding="utf-8")) & FORBIDDEN


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms of the runtime that the file imports from anywhere."""
    modules = (
        n.module
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(n, ast.ImportFrom)
    )
    ours = (module for module in modules if module and module.startswith("pass_runtime."))
    return {module.split(".")[1] for module in ours}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_the_architecture_says(room):
    paths = [
        path for path in SOURCES if path.relative_to(ROOT).parts[0].removesuffix(".py") == room
    ]
    assert paths
    assert set().union(*map(imported_rooms, paths)) <= ROOMS[room] | EVERYWHERE | {room}


def not_public(source: str) -> list[str]:
    """Return what `source` imports from the runtime beside the names of `pass_runtime.__all__`."""
    imported = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            public = PUBLIC_NAMES if node.module == "pass_runtime" else ()
            names = [alias.name for alias in node.names if alias.name not in public]
            imported += [f"{node.module}.{name}" for name in names]
    return [name for name in imported if name.partition(".")[0] == "pass_runtime"]


PUBLIC_NAMES = set(pass_runtime.__all__)
SHARED_BY_COMMANDS = ("pass_runtime.cli.flags", "pass_runtime.commands.errors.")
"""What `pass-run serve` and its flags share with the other commands."""


@pytest.mark.parametrize("path", SERVER_SOURCES, ids=lambda path: path.name)
def test_the_server_uses_public_names_only(path):
    allowed = SHARED_BY_COMMANDS if path.name in ("command.py", "flags.py") else ()
    for name in not_public(path.read_text(encoding="utf-8")):
        assert name.startswith(allowed), name


def test_every_public_name_is_there_and_documented():
    for name in PUBLIC_NAMES:
        value = getattr(pass_runtime, name)
        assert not callable(value) or value.__doc__, name


@pytest.mark.slow
def test_the_runtime_never_imports_the_server():
    for path in SOURCES:
        assert "pass_server" not in imported_modules(path.read_text(encoding="utf-8")), path


def test_the_model_for_triton_needs_no_package_of_the_extra_serve():
    of_serve = {"fastapi", "starlette", "uvicorn", "prometheus_client"}
    assert not loaded_by("pass_server.triton.model") & of_serve


def test_the_scan_sees_every_form_of_import():
    function = "def f():\n    from onnx.helper import x\n    import transformers as t\n"
    packages = imported_modules("import os, torch.nn\n" + function)
    assert packages == {"os", "torch", "onnx", "transformers"}
    assert len(SOURCES) > 10  # the glob found the package
    sources = [
        "import pass_runtime.session",
        "import os, pass_runtime as p",
        "from pass_runtime import Runner",
        "def f():\n    from pass_runtime.errors import PassError",
        "from pass_runtime import PassError, load",
    ]
    assert [len(not_public(each)) for each in sources] == [1, 1, 1, 1, 0]
    assert len(SERVER_SOURCES) > 10
