"""scripts/serve_load.py with a fake aiperf, which sends one request and reports its own flags."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

FAKE_AIPERF = f"""#!{sys.executable}
import json, sys, urllib.request
from pathlib import Path
words = sys.argv[2:]
flags = {{word: words[i + 1] for i, word in enumerate(words[:-1]) if word.startswith("--")}}
extra = dict(words[i + 1].split(":") for i, word in enumerate(words) if word == "--extra-inputs")
prompt = json.loads(Path(flags["--input-file"]).read_text().splitlines()[0])["text"]
assert (Path(flags["--tokenizer"]) / "tokenizer.json").exists()
body = {{"model": flags["--model"], "messages": [{{"role": "user", "content": prompt}}], "plan": extra["plan"]}}
body |= {{"max_completion_tokens": int(extra["max_completion_tokens"]), "temperature": 0}}
url = flags["--url"] + "/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {{"Content-Type": "application/json"}})
passes = json.load(urllib.request.urlopen(request))["choices"][0]["pass"]["passes"]
figure = {{"avg": float(flags["--concurrency"]), "p50": float(passes), "p99": 3.0}}
names = ("time_to_first_token", "inter_token_latency", "output_token_throughput", "output_token_throughput_per_user")
count = {{"request_count": {{"avg": int(flags["--request-count"])}}}}
place = Path(flags["--artifact-dir"])
place.mkdir()
(place / "profile_export_aiperf.json").write_text(json.dumps({{name: figure for name in names}} | count))
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module("serve_load")


@pytest.fixture
def aiperf(script, tmp_path, monkeypatch):
    """Return the path at which the script finds aiperf."""
    program = tmp_path / "aiperf"
    program.touch(0o755)
    monkeypatch.setattr(script, "install_aiperf", lambda: program)
    return program


@pytest.mark.slow
def test_a_row_for_every_number_of_clients(script, random_bundle, aiperf):
    aiperf.write_text(FAKE_AIPERF)
    flags = "--threads 1 --tokens 6 --prompts 4 --clients 1,16 --requests 8 --slots 2"
    done = CliRunner().invoke(script.main, [str(random_bundle), *flags.split()])
    assert done.exit_code == 0, done.output
    first, heading, _, *rows = [line for line in done.stdout.splitlines() if line]
    assert 0.1 < float(first.split(": ")[1].split()[0]) < 100
    assert [cell.strip() for cell in heading.strip("|").split("|")] == list(script.COLUMNS)
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows]
    assert [(row[0], row[1], row[7]) for row in cells] == [
        *(("1", "off", "8"), ("1", "on", "8")),
        *(("16", "off", "32"), ("16", "on", "32")),
    ]
    assert cells[0][2] == "6 ms"  # the fake reports passes as TTFT: without drafts, one per token


@pytest.mark.slow
def test_errors_of_aiperf_are_shown(script, random_bundle, aiperf):
    aiperf.write_text("#!/bin/sh\necho no such flag\nexit 3\n")
    flags = ["--threads", "1", "--tokens", "2", "--prompts", "3"]
    done = CliRunner().invoke(script.main, [str(random_bundle), *flags])
    assert "aiperf failed: no such flag" in str(done.exception)
