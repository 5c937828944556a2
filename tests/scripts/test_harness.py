"""scripts/harness.py writes tasks as lm-evaluation-harness reads them."""

from __future__ import annotations

import json
from pathlib import Path

import harness
import pytest
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.slow
def test_tasks_and_a_checkpoint_are_written(tiny_model: Path, tmp_path: Path):
    done = CliRunner().invoke(harness.main, [str(tiny_model), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for name, task in harness.TASKS.items():
        about = json.loads((tmp_path / "out" / f"{name}.yaml").read_text())
        assert about["task"] == name and about["metric_list"] == task["metric_list"]
        data = Path(about["dataset_kwargs"]["data_files"][about["test_split"]])
        items = [json.loads(line) for line in data.read_text().splitlines()]
        fields = [about[key] for key in about if key.startswith("doc_to_")]
        assert all(field in items[0] for field in fields if field)
    assert len(items) > 50
    for item in items:
        assert len(item["choices"]) == harness.CHOICES
        assert item["text"] == f"{item['context']} {item['choices'][item['gold']]}"
    checkpoint = tmp_path / "out" / "checkpoint"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).dtype.itemsize == 4
    assert AutoTokenizer.from_pretrained(checkpoint)("fox")["input_ids"]
