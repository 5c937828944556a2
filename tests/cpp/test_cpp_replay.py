"""The C++ runtime repeats golden traces of the Python runtime to the last bit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import golden_traces
import pytest
from cpp_programs import program_at

from conftest import export_bundle, make_model, write_random_weights

LOOPING = {"initializer_range": 0.06}
"""The model soon repeats itself, so that drafts are accepted."""
EXPORTS = {
    "fp32": {"adapter": True},
    "subset": {"adapter": True, "vocab_size": 1024},
    "int4": {"weights": "int4", "rule": "rejection"},
    "int8": {"weights": "int8"},
}
LARGE_MODEL_SCENES = (
    "fused both: every sampler",
    "a batch with n-grams",
    "what a slot gave up",
    "auto",
)
PORTABLE_SCENES = ("fused: every sampler", "a kept prefix, which is asked for", "a batch")


@pytest.fixture(scope="session")
def program() -> Path:
    return program_at("replay")


@pytest.fixture(scope="module")
def bundle(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    directory = tmp_path_factory.mktemp("golden")

    @cache
    def make(name: str) -> Path:
        options = dict(EXPORTS[name])
        sizes = {"vocab_size": options.pop("vocab_size")} if "vocab_size" in options else {}
        model = make_model(directory / f"model-{name}", **LOOPING, **sizes)
        if options.pop("adapter", False):
            weights = directory / f"{name}.safetensors"
            options["lookahead_weights"] = write_random_weights(
                model, weights, lookahead=4, head_rank=12, head_strength=0.1
            )
        return export_bundle(model, directory / name, lookahead=4, **options)

    return make


def replay(
    program: Path, bundle: Path, traces: Path, scenes: list
) -> subprocess.CompletedProcess[str]:
    command = [program, bundle, golden_traces.write(traces, scenes)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_replayed_results_are_those_of_python(
    name: str, program: Path, bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    exported, traces = bundle(name), tmp_path / "traces.jsonl"
    scenes = golden_traces.record(exported, tokens=20)
    done = replay(program, exported, traces, scenes)

    requests = [request for scene in scenes for request in scene["requests"]]
    assert done.stdout == f"{len(scenes)} scenes, {len(requests)} requests: equal\n"
    assert done.returncode == 0
    accepted = sum(result["stats"]["accepted"] for scene in scenes for result in scene["results"])
    assert accepted > 50, "drafts that are never accepted would prove little"
    assert {"ngram", "lookahead"} <= sources_of(scenes)

    # How many prompt tokens each request reused, in whole blocks of 16.
    reused = {
        s["name"]: [result["stats"]["cached_tokens"] for result in s["results"]] for s in scenes
    }
    # One request has another prompt, and one prefills the prompt of 90 tokens for all.
    assert sorted(reused["one prompt in a batch"]) == [0, 0] + [80] * 5
    # The slot's K/V were copied before other requests overwrote them.
    assert reused["what a slot gave up"][2] == 96
    assert reused["what a slot gave up"][4] == 144
    # The prompt of 40 tokens and the beginning of its answer.
    assert reused["fused: a conversation"][1] == reused["ar: a conversation"][1] == 48
    assert reused["a kept prefix, which is asked for"][1] == 32
    assert reused["salts"] == [0, 0, 64, 64, 0]
    (no_drafts,) = [s["results"] for s in scenes if s["name"] == "no drafts"]
    assert no_drafts and not any(result["stats"]["drafted"] for result in no_drafts)

    # Two changed values are two differences.
    scenes[1]["results"][0]["token_ids"][3] += 1
    scenes[2]["results"][1]["stats"]["passes"] += 1
    done = replay(program, exported, traces, scenes)
    assert done.returncode == 1
    assert done.stdout.endswith(": 2 differences\n")


@pytest.mark.slow
def test_replays_what_python_does_without_kernels(
    program: Path, bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASS_KERNELS", "off")
    exported = bundle("int4")
    scenes = golden_traces.record(exported, tokens=12, names=PORTABLE_SCENES)
    done = replay(program, exported, tmp_path / "traces.jsonl", scenes)
    assert done.stdout.endswith(" requests: equal\n"), done.stdout


@pytest.mark.slow
def test_replays_the_default_model(program: Path, smollm2_bundle: Path, tmp_path: Path) -> None:
    scenes = golden_traces.record(smollm2_bundle, tokens=12, names=LARGE_MODEL_SCENES)
    done = replay(program, smollm2_bundle, tmp_path / "traces.jsonl", scenes)
    assert done.stdout == "4 scenes, 20 requests: equal\n"
    assert {"ngram", "lookahead"} <= sources_of(scenes)


def sources_of(scenes: list[dict]) -> set[str]:
    return {s for scene in scenes for r in scene["results"] for s in r["sources"]}
