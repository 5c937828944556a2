"""What is missing for a device is said in one line, with what to do, before anything is loaded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cpp_programs import BUILD, program_at

RTX = "built without the headers of tensorrt-rtx: build it with -DPASS_TENSORRT_RTX_INCLUDE=DIRECTORY, or use "
REFUSALS: list[tuple[str, dict[str, str], str]] = [
    (
        "cuda",
        {},
        "has no CUDAExecutionProvider: set PASS_ONNXRUNTIME to the libonnxruntime.so of onnxruntime-gpu, or use",
    ),
    ("cuda", {"PASS_ONNXRUNTIME": "/nowhere/libonnxruntime.so"}, "; set PASS_ONNXRUNTIME to its libonnxruntime.so"),
    (
        "tensorrt",
        {"PASS_TENSORRT": "/nowhere/libnvinfer.so"},
        "; set PASS_TENSORRT to its library, as libnvinfer.so.10",
    ),
    ("tensorrt", {"PASS_TENSORRT": "libm.so.6"}, "libm.so.6 is not tensorrt; set PASS_TENSORRT to libnvinfer.so.10"),
    ("tensorrt-rtx", {}, RTX),
    (
        "tensorrt-rtx-ep",
        {},
        "needs ONNX Runtime's plugin for it: set PASS_TENSORRT_RTX_PLUGIN to its library, or use --device cpu",
    ),
    (
        "tensorrt-rtx-ep",
        {"PASS_TENSORRT_RTX_PLUGIN": "/nowhere/plugin.so"},
        "onnxruntime cannot register the plugin /nowhere/plugin.so: ",
    ),
    ("cuda:x", {}, "device 'cuda:x': a GPU's number must follow the colon, as in cuda:1"),
    ("cuda:", {}, "device 'cuda:': a GPU's number must follow the colon, as in cuda:1"),
    ("auto:1", {}, "device 'auto:1': auto takes no number; only cuda, "),
    ("cuda:1", {}, "has no CUDAExecutionProvider: set PASS_ONNXRUNTIME"),
    ("toaster", {}, "unknown device 'toaster': choose one of auto, cpu, cuda, tensorrt, tensorrt-rtx, tensorrt-rtx-ep"),
]


@pytest.mark.parametrize(("device", "variables", "told"), REFUSALS)
def test_what_is_missing_is_told(device: str, variables: dict[str, str], told: str, random_bundle: Path) -> None:
    program = program_at("pass-cpp")
    if device == "tensorrt" and "PASS_TENSORRT_INCLUDE:PATH=\n" in (BUILD / "CMakeCache.txt").read_text("utf-8"):
        pytest.skip("built without TensorRT's headers")
    done = subprocess.run(
        [program, "generate", random_bundle, "--prompt-ids", "5,6", "--device", device],
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert told in done.stderr
