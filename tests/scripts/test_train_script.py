"""scripts/train.sh makes weights, curves and a card with measured acceptance, for a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pass_exporter.model.lookahead import read_record

ROOT = Path(__file__).parents[2]
SMALL = (
    "--sequences 64 --sequence-length 96 --prompt-tokens 4 8 --chat-share 0 --write-with torch "
    "--dtype fp32 --device cpu --rank 4 --head-rank 8"
)


@pytest.mark.slow
def test_the_recipe_writes_weights_figures_and_a_card_and_a_second_call_continues_it(
    tiny_model: Path, tmp_path: Path
):
    tasks, target = tmp_path / "tasks.jsonl", tmp_path / "models"
    lines = [json.dumps({"message": f"why is fox {i} red?"}) for i in range(50)]
    tasks.write_text("\n".join(lines) + "\n")
    variables = {
        "PROMPTS": str(tasks),
        "OUTPUT": str(tmp_path / "run"),
        "TARGET": str(target),
        "PASS_CACHE": str(tmp_path / "cache"),
        "LOOKAHEAD": "3",
        "ADAPTER_FROM": "0",
        "EVALUATE": "--each 1 --tokens 12 --temperatures 0,0.8",
    }
    for steps in ("3", "4"):
        done = subprocess.run(
            ["bash", "scripts/train.sh", str(tiny_model), steps, *SMALL.split()],
            cwd=ROOT,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    files = ["README.md", "curves.png", "lookahead.safetensors", "metrics.json"]
    assert sorted(path.name for path in target.iterdir()) == files
    card = (target / "README.md").read_text()
    assert "Not measured yet" not in card
    record = read_record(target / "lookahead.safetensors")
    assert (record.steps, record.recipe["sequences"]) == (4, 64)
    assert record.recipe["aim"] == "acceptance"
