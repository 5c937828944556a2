from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pass_runtime

FORBIDDEN = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors"}
FORBIDDEN |= {"pass_exporter"}
ROOT = Path(pass_runtime.__file__).parent
SERVER = ROOT.parent / "pass_server"
SOURCES = sorted(ROOT.rglob("*.py"))
SERVER_SOURCES = sorted(SERVER.rglob("*.py"))
PUBLIC_NAMES = set(pass_runtime.__all__)
SHARED_BY_COMMANDS = ("pass_runtime.cli.flags", "pass_runtime.commands.errors.")
"""What `pass-run serve` and its flags share with the other commands."""
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


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that `source` imports anywhere, in functions too, with the names that it
    imports from them, or "" for the module itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def imported_packages(source: str) -> set[str]:
    return {module.partition(".")[0] for module, _ in imports(source)}


def loaded_by(modules: list[str]) -> set[str]:
    """Return the top-level packages that a process has loaded after it imported `modules`."""
    code = f"import {', '.join(modules)}, sys\n"
    code += "print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_runtime_imports_no_framework_and_no_server():
    names = [path.relative_to(ROOT.parent).with_suffix("").parts for path in SOURCES]
    modules = [".".join(parts) for parts in names if not parts[-1].startswith("__")]
    loaded = loaded_by(modules)
    assert len(modules) > 50 and "onnxruntime" in loaded
    assert not loaded & {*FORBIDDEN, "pass_server"}


def test_no_source_imports_a_framework():
    for path in (*SOURCES, *SERVER_SOURCES):
        assert not imported_packages(path.read_text(encoding="utf-8")) & FORBIDDEN, path


def test_the_runtime_never_imports_the_server():
    for path in SOURCES:
        assert "pass_server" not in imported_packages(path.read_text(encoding="utf-8")), path


def test_the_model_for_triton_needs_no_package_of_the_extra_serve():
    of_serve = {"fastapi", "starlette", "uvicorn", "prometheus_client"}
    assert not loaded_by(["pass_server.triton.model"]) & of_serve


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_the_architecture_says(room):
    paths = [
        path for path in SOURCES if path.relative_to(ROOT).parts[0].removesuffix(".py") == room
    ]
    modules = {m for path in paths for m, _ in imports(path.read_text(encoding="utf-8"))}
    rooms = {m.split(".")[1] for m in modules if m.startswith("pass_runtime.")}
    assert paths and rooms <= ROOMS[room] | EVERYWHERE | {room}


def not_public(source: str) -> list[str]:
    """Return what `source` imports from the runtime beside the names of `pass_runtime.__all__`."""
    return [
        f"{module}.{name}"
        for module, name in imports(source)
        if module.partition(".")[0] == "pass_runtime"
        and not (module == "pass_runtime" and name in PUBLIC_NAMES)
    ]


@pytest.mark.parametrize("path", SERVER_SOURCES, ids=lambda path: path.name)
def test_the_server_uses_public_names_only(path):
    allowed = SHARED_BY_COMMANDS if path.name in ("command.py", "flags.py") else ()
    for name in not_public(path.read_text(encoding="utf-8")):
        assert name.startswith(allowed), name


def test_every_public_name_is_there_and_documented():
    for name in PUBLIC_NAMES:
        value = getattr(pass_runtime, name)
        assert not callable(value) or value.__doc__, name


def test_the_scan_sees_every_form_of_import():
    function = "def f():\n    from onnx.helper import x\n    import transformers as t\n"
    packages = imported_packages("import os, torch.nn\n" + function)
    assert packages == {"os", "torch", "onnx", "transformers"}
    sources = [
        "import pass_runtime.session",
        "import os, pass_runtime as p",
        "from pass_runtime import Runner",
        "def f():\n    from pass_runtime.errors import PassError",
        "from pass_runtime import PassError, load",
    ]
    assert [len(not_public(each)) for each in sources] == [1, 1, 1, 1, 0]
    assert len(SERVER_SOURCES) > 10
