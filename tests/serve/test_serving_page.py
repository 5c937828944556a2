"""docs/serving.md and the README: their commands and examples run; flags and metrics exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from running import Server

from pass_runtime.cli.main import main

README, PAGE = (
    (Path(__file__).parents[2] / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/serving.md")
)
CURLS = re.findall(r"^    (curl .*)$", README + PAGE, re.MULTILINE)
DOCUMENTED_MODEL = "smollm2-135m"


def adapted(text: str, server: Server) -> str:
    """Return a documented command or program with the address and model of the test's server."""
    text = text.replace("http://127.0.0.1:8000", server.url)
    return text.replace(DOCUMENTED_MODEL, server.model)


@pytest.mark.parametrize("line", CURLS, ids=range(len(CURLS)))
def test_the_commands_run(server, line):
    done = subprocess.run(
        ["bash", "-c", adapted(line, server)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    if "stream" in line:
        assert done.stdout.endswith("data: [DONE]\n\n")
    elif "metrics" in line:
        assert "vllm:num_requests_running" in done.stdout
    else:
        assert "error" not in json.loads(done.stdout)
        assert "choices" in json.loads(done.stdout) or "/v1/completions" not in line


CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PRINTED = ("'seed': 7", "city=", "complete")
"""Part of what each example prints. The last one prints `completed` or `incomplete`."""


@pytest.mark.parametrize(("code", "printed"), [*zip(CODE, PRINTED, strict=True)], ids=PRINTED)
def test_the_python_runs(server, capsys, code, printed):
    exec(compile(adapted(code, server), "serving.md", "exec", dont_inherit=True), {})
    assert printed in capsys.readouterr().out


def test_the_table_lists_all_metrics(server):
    server.complete(max_tokens=8, plan="fused", ignore_eos=True)
    table = PAGE[PAGE.index("## Metrics") : PAGE.index("## In another server")]
    documented = {
        name.removesuffix("_total") for name in re.findall(r"`((?:vllm|pass):\w+)", table)
    }
    names = re.findall(r"^# TYPE (\S+) ", server.metrics(), re.MULTILINE)
    served = {name.removesuffix("_total") for name in names if not name.endswith("_created")}
    assert documented == served


def test_the_flags_exist():
    helps = [CliRunner().invoke(main, [command, "--help"]).output for command in ("serve", "chat")]
    for flag in set(re.findall(r"`(?:pass-run \S+ )?(--[a-z-]+)", PAGE)):
        assert flag in "".join(helps), flag
