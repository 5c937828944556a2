"""examples/minimal_driver.py writes what the runtime writes, and stays small."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pass_runtime import GenerateOptions, load

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "examples" / "minimal_driver.py"
PROMPT, TOKENS = [5, 90, 33, 17, 120, 8, 44], 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_bundle", "head_bundle"])
def test_the_minimal_driver_writes_what_the_runtime_writes(name, request):
    bundle: Path = request.getfixturevalue(name)
    with load(bundle, "cpu", threads=1) as session:
        options = GenerateOptions(TOKENS, plan="ar", ignore_eos=True)
        expected = session.generate_ids(PROMPT, options).result().token_ids
        after_one_token = session.generate_ids(PROMPT[:1], options).result().token_ids
        plans = [plan.name for plan in session.manifest.layouts]
    driver = runpy.run_path(str(DRIVER))["MinimalDriver"](bundle)
    for plan in plans:
        assert driver.generate(PROMPT, plan, TOKENS) == expected, plan
    assert driver.generate(PROMPT[:1], "ar", TOKENS) == after_one_token
    words = [sys.executable, DRIVER, bundle, plans[-1], TOKENS, *PROMPT]
    run = subprocess.run([*map(str, words)], capture_output=True, text=True, check=True)
    assert (run.stdout.split(), run.stderr) == ([*map(str, expected)], "")


def test_the_minimal_driver_is_small_and_needs_numpy_and_onnxruntime_alone():
    source = DRIVER.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, ast.Import)]
    modules = {alias.name for node in imports for alias in node.names}
    modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    packages = {name.partition(".")[0] for name in modules}
    assert packages - set(sys.stdlib_module_names) == {"numpy", "onnxruntime"}
    assert len(source.splitlines()) <= 90
