"""In C++, every plan with every source of drafts writes the text of `ar` up to the end of a small
KV capacity, also in batches."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from capacity_table import BATCHES, CAPACITIES, UNLIMITED, cases, prompt_of, texts_needed
from cpp_programs import program_at

from pass_runtime import GenerateOptions, load
from pass_runtime.bundle.sampling import SamplingParams


@pytest.fixture(scope="session")
def program() -> Path:
    return program_at("replay")


def request(
    length: int, plan: str = "auto", draft: str | None = None, **more: Any
) -> dict[str, Any]:
    options = {
        "max_new_tokens": UNLIMITED,
        "temperature": 0.0,
        "ignore_eos": True,
        "plan": plan,
        "draft": draft,
    }
    return {"prompt_ids": prompt_of(length), **options, **more}


def replay(
    program: Path, bundle: Path, scenes: list[dict[str, Any]], file: Path
) -> subprocess.CompletedProcess[str]:
    """Run the scenes in C++, which compares tokens and finish reasons."""
    for scene in scenes:
        scene["compare"] = "tokens"
    file.write_text("".join(json.dumps(scene) + "\n" for scene in scenes), "utf-8")
    command = [program, bundle, file, "1"]  # one thread
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_plan_writes_the_text_of_ar(
    program: Path, random_bundle: Path, capacity: int, tmp_path: Path
):
    """The requests of a case begin in one round, after those of the previous case have ended. A
    short request follows all cases."""
    options = GenerateOptions(UNLIMITED, SamplingParams(0.0), plan="ar", ignore_eos=True)
    with load(random_bundle, "cpu", threads=1, capacity=capacity) as session:
        texts = {
            n: session.generate_ids(prompt_of(n), options).result().token_ids
            for n in texts_needed(capacity)
        }
    scenes = []
    for batch in BATCHES:
        lengths, requests, first_round = [], [], 0
        for case in cases(capacity, batch):
            lengths += case.prompt_lengths
            requests += [
                request(length, case.plan, case.draft, round=first_round)
                for length in case.prompt_lengths
            ]
            first_round += 2 * capacity  # more rounds than any case takes
        lengths.append(1)
        requests.append(request(1, round=first_round))
        results = [
            {"token_ids": texts[length], "finish_reason": "length", "stop_reason": None}
            for length in lengths
        ]
        name = f"capacity {capacity}, {batch} at a time"
        scenes.append(
            {
                "name": name,
                "slots": batch,
                "capacity": capacity,
                "requests": requests,
                "results": results,
            }
        )
    done = replay(program, random_bundle, scenes, tmp_path / "scenes.jsonl")
    count = sum(len(scene["requests"]) for scene in scenes)
    assert (done.stdout, done.stderr) == (f"{len(scenes)} scenes, {count} requests: equal\n", "")
    assert done.returncode == 0
