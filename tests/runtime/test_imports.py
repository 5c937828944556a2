"""The runtime stands on numpy and an engine: neither torch nor anything of the exporter is ever imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pass_runtime

FORBIDDEN = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "pass_exporter"}
ROOT = Path(pass_runtime.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
EVERYWHERE = {"errors", "files", "json_lines"}
PUBLIC = {"options", "generation", "resolver", "session"}
SESSION = {"bundle", "backends", "tuning", "decode", "text", *PUBLIC}
ROOMS = {  # what each room of docs/architecture.md may import, besides EVERYWHERE
    "bundle": set(),
    "backends": {"bundle"},
    "tuning": {"bundle", "backends"},
    "decode": {"bundle", "backends", "tuning"},
    "text": {"bundle"},
    **dict.fromkeys([*PUBLIC, "measuring"], SESSION),
    "cli": {*SESSION, "measuring"},
}


def imported_modules(source: str) -> set[str]:
    """Top-level packages that `source` imports anywhere, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize(
    "module", ["", ".cli.main", ".measuring.real_use", ".measuring.lossless", ".cli.batch", ".cli.bench"]
)
def test_importing_the_runtime_imports_no_framework(module):
    code = f"import pass_runtime{module}, sys; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "pass_runtime" in loaded
    assert not loaded & FORBIDDEN


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_source_imports_a_framework(path):
    assert not imported_modules(path.read_text(encoding="utf-8")) & FORBIDDEN


def imported_rooms(path: Path) -> set[str]:
    """Rooms of the runtime that the file imports anywhere."""
    modules = (n.module for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.ImportFrom))
    return {module.split(".")[1] for module in modules if module and module.startswith("pass_runtime.")}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_the_architecture_says(room):
    paths = [path for path in SOURCES if path.relative_to(ROOT).parts[0].removesuffix(".py") == room]
    assert paths
    assert set().union(*map(imported_rooms, paths)) <= ROOMS[room] | EVERYWHERE | {room}


def test_the_scan_sees_every_form_of_import():
    source = "import os, torch.nn\ndef f():\n    from onnx.helper import x\n    import transformers as t\n"
    assert imported_modules(source) == {"os", "torch", "onnx", "transformers"}
    assert len(SOURCES) > 10  # the glob found the package
