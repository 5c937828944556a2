"""scripts/harness.py with a stand-in for lm-evaluation-harness, which sends its requests, reads its
tasks and writes its files."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

LM_EVAL = f"""#!{sys.executable}
import json, sys, urllib.request
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

flags = dict(zip(sys.argv[1:-1], sys.argv[2:]))
given = dict(pair.split("=", 1) for pair in flags["--model_args"].split(","))
tokenizer = AutoTokenizer.from_pretrained(given.get("tokenizer") or given["pretrained"])

def with_hf(ids):
    model = AutoModelForCausalLM.from_pretrained(given["pretrained"], dtype=given["dtype"])
    rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    return rows[range(len(ids) - 1), ids[1:]].tolist()

def with_server(ids):
    body = {{"model": given["model"], "prompt": [ids], "temperature": 0, "max_tokens": 1}}
    body |= {{"logprobs": 1, "seed": 1234, "echo": True}}
    headers = {{"Content-Type": "application/json"}}
    request = urllib.request.Request(given["base_url"], json.dumps(body).encode(), headers)
    choice = json.load(urllib.request.urlopen(request))["choices"][0]
    return choice["logprobs"]["token_logprobs"][1:-1]

score = with_hf if flags["--model"] == "hf" else with_server
place = Path(flags["--output_path"]) / "model"
place.mkdir(parents=True)
results = {{}}
for task in flags["--tasks"].split(","):
    about = json.loads((Path(flags["--include_path"]) / f"{{task}}.yaml").read_text())
    assert about["task"] == task
    data = about["dataset_kwargs"]["data_files"][about["test_split"]]
    samples = []
    for number, line in enumerate(Path(data).read_text().splitlines()[:3]):
        item = json.loads(line)
        context = item.get(about["doc_to_text"], "")
        is_choice = "doc_to_choice" in about
        texts = item["choices"] if is_choice else [item[about["doc_to_target"]]]
        assert "gold" in item and item["choices"][item["gold"]] in item["text"]
        values = [sum(score(tokenizer(f"{{context}} {{text}}")["input_ids"])) for text in texts]
        resps = [[[value, "False"]] for value in values] if len(values) > 1 else [values]
        samples.append({{"doc_id": number, "resps": resps}})
    lines = "".join(json.dumps(sample) + "\\n" for sample in samples)
    (place / f"samples_{{task}}_2026.jsonl").write_text(lines)
    results[task] = {{f"{{each['metric']}},none": 0.5 for each in about["metric_list"]}}
(place / "results_2026.json").write_text(json.dumps({{"results": results}}))
"""


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module("harness")


@pytest.fixture
def lm_eval(script, tmp_path, monkeypatch):
    """Return the path at which the script finds the harness."""
    program = tmp_path / "lm_eval"
    program.touch(0o755)
    monkeypatch.setattr(script, "install_lm_eval", lambda: program)
    return program


@pytest.mark.slow
def test_a_row_for_the_checkpoint_and_for_every_bundle(
    script, tiny_model, tiny_bundle, random_bundle, lm_eval
):
    lm_eval.write_text(LM_EVAL)
    bundles = [str(tiny_bundle), str(random_bundle)]
    flags = ["--threads", "1", "--slots", "2"]
    done = CliRunner().invoke(script.main, [str(tiny_model), *bundles, *flags])
    assert done.exit_code == 0, done.output
    heading, _, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in heading.split("|")[1:-1]] == list(script.COLUMNS)
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[0] for row in cells] == ["hf", "tiny", "random"]
    assert all(row[1:-1] == ["0.5000"] * len(script.METRICS) for row in cells)
    assert float(cells[0][-1]) == 0 and all(float(row[-1]) < 0.05 for row in cells)


def test_a_harness_that_fails_is_an_error(script, tiny_model, lm_eval):
    lm_eval.write_text("#!/bin/sh\nexit 3\n")
    done = CliRunner().invoke(script.main, [str(tiny_model)])
    assert done.exit_code != 0 and "the harness failed" in str(done.exception)


def test_the_own_ending_is_among_the_choices(script):
    items = list(script.items())
    assert len(items) > 50
    for item in items:
        assert len(item["choices"]) == script.CHOICES
        assert item["text"] == f"{item['context']} {item['choices'][item['gold']]}"
