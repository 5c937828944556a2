"""The runtime stands on numpy and an engine: neither torch nor anything of the exporter is ever imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pass_runtime

FORBIDDEN = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "pass_exporter"}
SOURCES = sorted(Path(pass_runtime.__file__).parent.rglob("*.py"))


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
    "module", ["", ".cli.main", ".testing.scripted", ".testing.lossless", ".cli.batch", ".cli.bench"]
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


def test_the_scan_sees_every_form_of_import():
    source = "import os, torch.nn\ndef f():\n    from onnx.helper import x\n    import transformers as t\n"
    assert imported_modules(source) == {"os", "torch", "onnx", "transformers"}
    assert len(SOURCES) > 10  # the glob found the package
