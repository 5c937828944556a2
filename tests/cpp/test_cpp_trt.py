"""The C++ runtime's TensorRT backend over fakes writes what Python's over its fakes writes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_traces
import pytest
from cpp_programs import report_of
from engine_sessions import Gpu, with_engines
from golden_traces import write

from conftest import export_bundle, make_model
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError

LOOKAHEAD, SLOTS = 4, 4

Play = Callable[..., Any]


@pytest.fixture(
    scope="module",
    params=[("match", 1), ("rejection", 2)],
    ids=["match", "rejection, padded windows"],
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rule, least_width = request.param
    directory = tmp_path_factory.mktemp("engines")
    model = make_model(directory / "model", initializer_range=0.06)
    bundle = export_bundle(model, directory / "exported", lookahead=LOOKAHEAD, rule=rule)
    return with_engines(bundle, directory, least_width, SLOTS)


@pytest.fixture
def gpu(engines: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(engines, monkeypatch)


@pytest.fixture
def fake_gpu(engines: Path, tmp_path: Path) -> Play:
    """Play scenes, or else only open the bundle."""

    def run(scenes: list[dict[str, Any]], *words: object, bundle: Path = engines) -> Any:
        return report_of("fake_gpu", bundle, write(tmp_path / "scenes.jsonl", scenes), *words)

    return run


def one_request(name: str, *plans: str) -> dict[str, Any]:
    prompt = golden_traces.Prompts(99, (0, 1, 2)).of(20)
    fixed = {"prompt_ids": prompt, "max_new_tokens": 9, "ignore_eos": True}
    return {"name": name, "slots": 1, "requests": [fixed | {"plan": plan} for plan in plans]}


def has_engines(request: dict[str, Any]) -> bool:
    return not request.get("plan", "").startswith("fused:") and "lookahead" not in request


def record(gpu: Gpu, tokens: int) -> list[dict[str, Any]]:
    scenes = list(golden_traces.scenes(gpu.manifest, tokens))
    for scene in scenes:
        scene["requests"] = [request for request in scene["requests"] if has_engines(request)]
        options = {"max_batch_size": scene["slots"]} | (
            {"capacity": scene["capacity"]} if "capacity" in scene else {}
        )
        with gpu.open(**options) as session:
            scene["results"] = golden_traces.play(session, scene)
    return [scene for scene in scenes if scene["requests"]]


@pytest.mark.slow
def test_writes_what_python_writes_and_replays_graphs(fake_gpu: Play, gpu: Gpu) -> None:
    scenes = record(gpu, tokens=20)
    played = fake_gpu(scenes)

    by_name = {scene["name"]: scene for scene in scenes}
    assert [scene["name"] for scene in played] == [*by_name]
    for scene in played:
        assert scene["differences"] == ""
        assert scene["device"] == "tensorrt 10.15.1.fake"
        assert scene["all_freed"], "something was not freed"
        assert scene["counters"][-1]["scratch"] == 1, "engines do not share their scratch memory"
        expected = by_name[scene["name"]]
        if "compare" in expected or any(w in scene["name"] for w in ("prefix", "moves")):
            continue  # played again, they run other passes: `auto` has learned, slots keep K/V
        before, last = scene["counters"][-2:]
        for kind in ("mallocs", "captures", "contexts"):
            assert last[kind] == before[kind] > 0, f"{scene['name']}: {kind}"
        passes = max(result["stats"]["passes"] for result in expected["results"])
        # Every pass is a launch, and the prompts take at least one more.
        assert last["launches"] - before["launches"] > passes, scene["name"]
    sources = {
        source for scene in scenes for result in scene["results"] for source in result["sources"]
    }
    assert {"ngram", "lookahead", "model"} <= sources
    assert sum(result["stats"]["accepted"] for scene in scenes for result in scene["results"]) > 50

    scenes[0]["results"][0]["token_ids"][3] += 1
    assert "token_ids" in fake_gpu(scenes[:1])[0]["differences"]


@pytest.mark.slow
def test_a_session_uses_only_its_gpu(fake_gpu: Play, gpu: Gpu) -> None:
    """The fake refuses all others."""
    (scene, *_) = record(gpu, tokens=9)
    (played,) = fake_gpu([scene | {"ordinal": 1}])
    assert (played["differences"], played["all_freed"]) == ("", True)
    refused = fake_gpu([], "open", 9, 0, 1, 1)
    assert refused["refusal"] == (
        "there is no GPU 1: 1 GPU is visible, number 0 (see nvidia-smi, and CUDA_VISIBLE_DEVICES)"
    )


@pytest.mark.parametrize(
    ("driver", "hint"),
    [
        (
            12040,
            "it runs CUDA up to 12.4, and the library is CUDA 13.4; update to a driver for "
            "CUDA 13, 580 or newer",
        ),
        (0, "there is no NVIDIA driver here: is the GPU visible to nvidia-smi?"),
    ],
)
def test_an_old_driver_is_refused_with_a_hint(driver: int, hint: str, fake_gpu: Play) -> None:
    refused = fake_gpu([], "open", 9, 0, 1, 0, driver)
    assert hint in refused["refusal"]
    assert refused["mallocs"] == 0 and refused["all_freed"]


@pytest.mark.slow
def test_a_warm_session_captures_nothing_in_requests(fake_gpu: Play, gpu: Gpu) -> None:
    scenes = [
        scene
        for scene in record(gpu, tokens=20)
        if all(plain_sampling(request) for request in scene["requests"])
    ]
    assert len(scenes) > 3
    for scene, played in zip(scenes, fake_gpu(scenes, "warm"), strict=True):
        assert (played["differences"], played["all_freed"]) == ("", True), scene["name"]
        assert played["uncaptured"] == {}
        before, after = played["before"], played["after"]
        assert before["captures"] > 10
        for kind in ("captures", "contexts"):
            assert after[kind] == before[kind], f"{scene['name']}: {kind}"


def plain_sampling(request: dict[str, Any]) -> bool:
    """Whether `warm_up` captures what the request needs."""
    processors = {"presence_penalty", "repetition_penalty", "logit_bias", "min_tokens"}
    return not ({"top_k", "top_p", "min_p", "logprobs"} | processors) & request.keys()


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["runs", "allocations"])
def test_a_session_works_after_any_failure(failing: str, fake_gpu: Play, gpu: Gpu) -> None:
    scene = one_request(failing, "ar", "fused")
    with gpu.open() as session:
        scene["results"] = golden_traces.play(session, scene)

    report = fake_gpu([scene], failing)

    assert report["failures"] > 10
    # If a run fails while it is being captured, that is only logged.
    uncaptured = [
        message
        for message in report["logged"]
        if "runs without a CUDA graph, and so more slowly" in message
    ]
    assert len(report["errors"]) + len(uncaptured) == report["failures"]
    assert bool(uncaptured) == (failing == "runs") and len(uncaptured) < len(report["errors"])
    reasons = {
        "runs": {"failed to run (enqueueV3: it gave no reason)"},
        "allocations": {
            "MiB free; cudaMalloc failed with CUDA error 2 (out of memory)); stop other programs",
            (
                "MiB left to pin for the GPU (cudaMallocHost failed with CUDA error 2 (out of "
                "memory)); stop"
            ),
        },
    }[failing]
    assert {words for error in report["errors"] for words in reasons if words in error} == reasons
    assert all(any(words in error for words in reasons) for error in report["errors"])
    assert report["differences"] == ""
    assert report["all_freed"]


@pytest.mark.parametrize("code", [700, 719, 46])
def test_a_lost_device_closes_the_session(code: int, fake_gpu: Play) -> None:
    """After error 46 (the device is busy), which does not last, the next request is served."""
    errors = fake_gpu([one_request("sticky", "ar")], "sticky", code)["errors"]
    if code == 46:
        assert all("CUDA error 46" in error for error in errors[:2]) and errors[2] == ""
    else:
        name = {700: "cudaErrorIllegalAddress", 719: "cudaErrorLaunchFailure"}[code]
        lost = (
            rf"the GPU works no more for this process \(CUDA error {code}, {name}, "
            rf"cuda\w+\); restart the process"
        )
        assert re.fullmatch(lost, errors[0]) and errors == errors[:1] * 3


@pytest.mark.slow
@pytest.mark.parametrize("function", ["begin", "end", "instantiate"])
def test_a_failed_capture_fails_no_request(function: str, fake_gpu: Play, gpu: Gpu) -> None:
    cuda_function = {
        "begin": "cudaStreamBeginCapture",
        "end": "cudaStreamEndCapture",
        "instantiate": "cudaGraphInstantiate",
    }[function]
    scenes = [scene for scene in record(gpu, tokens=9) if scene["slots"] > 1][:2]
    assert scenes
    for report in fake_gpu(scenes, "captures", function):
        assert report["differences"] == "" and report["all_freed"]
        assert report["counters"]["captures"] == report["counters"]["launches"] == 0
        logged = [message for message in report["logged"] if "runs without a CUDA graph" in message]
        assert len(logged) == len(set(logged)) > 3
        reason = f"{cuda_function} failed with CUDA error 901 (an error)"
        assert all(reason in message for message in logged)
        uncaptured = report["uncaptured"]
        assert len(uncaptured) == len(logged)
        assert all(reason in text for text in uncaptured.values())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("deserializeCudaEngine", "cannot be loaded on this GPU"),
        ("createExecutionContext", "gets no execution context"),
        ("setOptimizationProfileAsync", "does not take profile"),
        ("setInputShape", "refuses shape"),
        ("setTensorAddress", "refuses the address of"),
        ("enqueueV3", "failed to run"),
    ],
)
def test_errors_name_the_failing_function_and_its_reason(
    function: str, message: str, fake_gpu: Play
) -> None:
    scene = one_request(function, "ar")
    error = fake_gpu([scene], "refused", function)["error"]
    assert message in error
    assert f"({function}: [{function}.cpp::7] Error Code 3: a fake error)" in error


def test_engines_that_do_not_fit_are_refused_as_in_python(
    engines: Path, fake_gpu: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(engines, bundle)
    manifest = read_manifest(bundle)
    (engine_set,) = manifest.engines

    def refused(*device: int, **changes: Any) -> str:
        """Return the error of both runtimes for the engine set with `changes`. device: the compute
        capability of the fake GPU; the default fits."""
        changed = manifest.model_copy(update={"engines": (engine_set.model_copy(update=changes),)})
        (bundle / FILE_NAME).write_text(changed.text(), "utf-8")
        cpp = fake_gpu([], "open", *device, bundle=bundle)
        assert cpp["all_freed"] and cpp["mallocs"] == 0
        python = Gpu(bundle, monkeypatch, **({"target": device[:2]} if device else {}))
        python.library = LIBRARIES["tensorrt"]
        with pytest.raises(PassError) as error:
            python.open()
        assert cpp["refusal"] == str(error.value)
        return str(error.value)

    assert "(Fake GPU) is sm86" in refused(8, 6)
    assert "were built by version 10.16, and 10.15.1.fake is installed" in refused(version="10.16")
    assert "were built from other graphs" in refused(bundle="0" * 64)
    assert "has no tensorrt engines" in refused(library="tensorrt-rtx")
    # The trunk's engine is the first.
    files = sorted(engine_set.engines, key=lambda file: file.graph != manifest.trunk.file)
    assert "is not the file that was built" in refused(
        engines=(*files[1:], files[0].model_copy(update={"bytes": 3}))
    )
    assert "is not the file that was built" in refused(
        engines=(files[0].model_copy(update={"sha256": "0" * 64}),)
    )
    path = engine_set.path(bundle) / files[0].file
    path.unlink()
    assert "is missing; run: pass-export build" in refused()
    assert (
        fake_gpu([], "open", 9, 0, 0, bundle=bundle)["refusal"]
        == "tensorrt needs an NVIDIA GPU, and none is visible (CUDA sees no GPU; is it visible to "
        "nvidia-smi, and not hidden by CUDA_VISIBLE_DEVICES?); use --device cpu"
    )
