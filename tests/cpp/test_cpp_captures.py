"""The C++ runtime's `--device cuda` over a fake of ONNX Runtime's CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import golden_traces
import pytest
from cpp_programs import report_of

from conftest import export_bundle, make_model, write_random_weights
from pass_runtime import load
from pass_runtime.bundle.read import read_manifest

SCENES = (
    "ar: every sampler",
    "two-pass: every sampler",
    "fused: every sampler",
    "fused both: every sampler",
    "log-probabilities",
    "a batch",
    "a batch with processors in some slots",
)
LOGGED = " runs without a CUDA graph, and so more slowly: "


@pytest.fixture(scope="module", params=["match", "rejection"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tails of the rejection rule overwrite draft probabilities they read."""
    directory = tmp_path_factory.mktemp("captures")
    model = make_model(directory / "model", initializer_range=0.06)
    weights = write_random_weights(
        model, directory / "weights", lookahead=4, head_rank=12, head_strength=0.1
    )
    return export_bundle(
        model, directory / "bundle", lookahead=4, lookahead_weights=weights, rule=request.param
    )


def run_program(bundle: Path, directory: Path, scenes: list[dict[str, Any]], *words: object) -> Any:
    scenes_file = golden_traces.write(directory / "scenes.jsonl", scenes)
    return report_of("fake_ort", bundle, scenes_file, *words)


def scenes_of(bundle: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    all_scenes = golden_traces.scenes(read_manifest(bundle), tokens=16)
    chosen = [scene for scene in all_scenes if scene["name"] in names]
    assert len(chosen) == len(names)
    return chosen


@pytest.fixture(scope="module")
def played(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_program(bundle, tmp_path_factory.mktemp("played"), scenes_of(bundle, SCENES))


def test_the_run_that_captures_counts_as_one_pass(played: list[dict[str, Any]]) -> None:
    """That run executes a tail three times, and each time would lay out another window."""
    for scene in played:
        assert scene["differences"] == "", scene["name"]
        assert scene["eager"] == 0 and scene["uncaptured"] == {} and scene["logged"] == []
        assert scene["all_freed"], "something was not freed"
    files = {file for scene in played for file in scene["files"]}
    assert "trunk.onnx" in files and len(files) > 10
    assert sum(scene["replays"] for scene in played) > 500


def test_sessions_run_graphs_in_one_thread(played: list[dict[str, Any]]) -> None:
    for scene in played:
        assert scene["threads"] == 1, scene["name"]
        before, after = scene["captured"]
        assert before == after > 0, scene["name"]


@pytest.mark.parametrize("refused", ["trunk", "tail"])
def test_a_failed_capture_fails_no_request(refused: str, bundle: Path, tmp_path: Path) -> None:
    for scene in run_program(bundle, tmp_path, scenes_of(bundle, SCENES[-2:]), "refused", refused):
        assert scene["differences"] == "", scene["name"]
        assert scene["eager"] > 0 and scene["captured"][0] > 0 and scene["all_freed"]
        uncaptured = scene["uncaptured"]
        assert uncaptured and all(name.startswith(refused) for name in uncaptured)
        assert all("CUDA failure 901" in why for why in uncaptured.values())
        assert sorted(message.split(LOGGED)[0] for message in scene["logged"]) == sorted(uncaptured)


def test_a_device_error_in_a_capture_fails_all_later_requests(bundle: Path, tmp_path: Path) -> None:
    report = run_program(bundle, tmp_path, scenes_of(bundle, SCENES[-1:]), "lost", 700)
    first, second = report["errors"]
    assert (
        "the GPU works no more for this process (CUDA error 700, cudaErrorIllegalAddress" in first
    )
    assert second == first
    assert report["all_freed"]


@pytest.mark.slow
def test_prompts_are_read_in_wide_chunks(tmp_path: Path) -> None:
    """Chunks of 2048 rows give the text of the CPU, which has no wide chunks."""
    model = make_model(tmp_path / "model", max_position_embeddings=4096, num_hidden_layers=1)
    bundle = export_bundle(model, tmp_path / "bundle", lookahead=1)
    request = {
        "prompt_ids": [2 + i % 300 for i in range(2101)],
        "max_new_tokens": 4,
        "plan": "ar",
        "ignore_eos": True,
    }
    scene = {"name": "a long prompt", "slots": 1, "compare": "tokens", "requests": [request]}
    with load(bundle, device="cpu", threads=1) as session:
        scene["results"] = golden_traces.play(session, scene)
    (played,) = run_program(bundle, tmp_path, [scene])
    assert played["differences"] == "" and played["all_freed"]
    # Chunks of 2048 and 64 rows, then a trunk and a tail for each of 4 tokens. The first time, the
    # tail runs once more, with the inputs restored that the run that captured it overwrote.
    assert played["runs"] == [2 + 4 * 2 + 1, 2 + 4 * 2]
