"""A device that cannot be used is refused in one line that says what to do."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from cpp_programs import BUILD, program_at

REFUSALS: list[tuple[str, dict[str, str], str]] = [
    (
        "cuda",
        {},
        "has no CUDAExecutionProvider: set PASS_ONNXRUNTIME to the libonnxruntime.so of "
        "onnxruntime-gpu, or use",
    ),
    (
        "cuda",
        {"PASS_ONNXRUNTIME": "/nowhere/libonnxruntime.so"},
        "; set PASS_ONNXRUNTIME to its libonnxruntime.so",
    ),
    (
        "tensorrt",
        {"PASS_TENSORRT": "/nowhere/libnvinfer.so"},
        "; set PASS_TENSORRT to its library, as libnvinfer.so.10",
    ),
    (
        "tensorrt",
        {"PASS_TENSORRT": "libm.so.6"},
        "libm.so.6 is not tensorrt; set PASS_TENSORRT to libnvinfer.so.10",
    ),
    ("tensorrt-rtx", {}, "unknown device 'tensorrt-rtx': choose one of auto, cpu, cuda, tensorrt"),
    ("cuda:x", {}, "device 'cuda:x': a GPU's number must follow the colon, as in cuda:1"),
    ("cuda:", {}, "device 'cuda:': a GPU's number must follow the colon, as in cuda:1"),
    ("auto:1", {}, "device 'auto:1': auto takes no number; only cuda, "),
    ("cuda:1", {}, "has no CUDAExecutionProvider: set PASS_ONNXRUNTIME"),
]


def skip_without_tensorrt_headers() -> None:
    if re.search(
        r"^PASS_TENSORRT_INCLUDE:\w+=$", (BUILD / "CMakeCache.txt").read_text("utf-8"), re.MULTILINE
    ):
        pytest.skip("built without TensorRT's headers")


def library_of_version(folder: Path, major: str, minor: str) -> Path:
    """Build a library that only reports this version."""
    path = folder / f"libnvinfer.so.{major}"
    numbers = {"Major": major, "Minor": minor}
    source = "".join(
        f"int getInferLib{part}Version(void) {{ return {value}; }}\n"
        for part, value in numbers.items()
    )
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-xc", "-", "-o", path], input=source, text=True, check=True
    )
    return path


SUPPORTED = "tensorrt is run from 10.15 (the first with a KV cache layer) to 11; set PASS_TENSORRT"
OTHER_VERSIONS = {
    "8.6": f"is version 8.6, and {SUPPORTED}",
    "10.14": f"is version 10.14, and {SUPPORTED}",
    "12.0": f"is version 12.0, and {SUPPORTED}",
    "1.7": f"is version 1.7, and {SUPPORTED}",  # of TensorRT-RTX
    "10.15": "does not start with the headers of 10.",
    "11.4": "built without the headers of tensorrt 11: build it with "
    "-DPASS_TENSORRT_INCLUDE=DIRECTORY, or use ",
}


def refusal(bundle: Path, *flags: object, **environment: str) -> str:
    command = [program_at("pass-cpp"), "generate", bundle, "--prompt-ids", "5,6", *flags]
    if "tensorrt" in flags:
        skip_without_tensorrt_headers()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_other_versions_of_tensorrt_are_refused(
    version: str, tmp_path: Path, random_bundle: Path
) -> None:
    library = library_of_version(tmp_path, *version.split("."))
    reason = refusal(random_bundle, "--device", "tensorrt", "--tensorrt", library)
    assert OTHER_VERSIONS[version] in reason


@pytest.mark.parametrize(("device", "variables", "reason"), REFUSALS)
def test_a_device_that_cannot_be_used_is_refused(
    device: str, variables: dict[str, str], reason: str, random_bundle: Path
) -> None:
    assert reason in refusal(random_bundle, "--device", device, **variables)
