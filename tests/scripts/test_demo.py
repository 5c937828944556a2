"""scripts/demo.sh with programs that only write down how they were called, and a made-up
nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_suites import ROOT, Checkout

SMI = "GPU 0: NVIDIA H200 (UUID: GPU-1)"
NO_GPU = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
ON_GPU = [
    "pass-export --model smollm2-135m --lookahead 4 --dtype fp16 --output build/smollm2-135m-fp16",
    "pass-run generate build/smollm2-135m-fp16 --device cuda",
    "pass-run bench build/smollm2-135m-fp16 --device cuda",
]
ON_CPU = [
    (
        "pass-export --model smollm2-135m --lookahead 4 --weights w8a8 --output "
        "build/smollm2-135m-w8a8"
    ),
    "pass-run generate build/smollm2-135m-w8a8 --device cpu",
    "pass-run bench build/smollm2-135m-w8a8 --device cpu",
]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A copy of the scripts on a machine without nvidia-smi and libcuda."""
    made = Checkout(tmp_path)
    made.copy("scripts/demo.sh")
    return made


def show(checkout: Checkout, answer: str, status: int = 0) -> None:
    """Give the machine an nvidia-smi that answers this."""
    checkout.program(
        checkout.root / "bin/nvidia-smi", f"#!/bin/sh\necho '{answer}'\nexit {status}\n"
    )


def used(checkout: Checkout, *flags: str, **environment: str) -> tuple[str, list[str]]:
    """Where pip installed what, and the calls of the toolkit without what follows the device."""
    status, calls, said = checkout.run(
        "scripts/demo.sh", *flags, **({"STATUS_OF_STDIN": "1"} | environment)
    )
    assert status == 0, said
    (installed,) = [call for call in calls if "pip install" in call]
    where, *_, what = installed.replace("/", " ").split()
    return f"{where} {what}", [
        call.split(" --chat")[0] for call in calls if call.startswith("pass-")
    ]


def test_a_gpu_that_nvidia_smi_shows_is_used(checkout: Checkout):
    """With the extra that brings CUDA, in an environment of its own."""
    show(checkout, SMI)
    assert used(checkout) == (".venv-gpu .[export,gpu]", ON_GPU)


def test_a_gpu_that_the_driver_counts_is_used(checkout: Checkout):
    """As in a container without nvidia-smi."""
    assert used(checkout, STATUS_OF_STDIN="0") == (".venv-gpu .[export,gpu]", ON_GPU)


@pytest.mark.parametrize(
    ("answer", "status", "flags", "environment"),
    [
        (SMI, 0, ["--cpu"], {}),
        (SMI, 0, [], {"CUDA_VISIBLE_DEVICES": ""}),
        (SMI, 0, [], {"CUDA_VISIBLE_DEVICES": "-1"}),
        (NO_GPU, 9, [], {}),
        ("No devices were found", 0, [], {}),
    ],
)
def test_the_cpu_is_used_otherwise(
    checkout: Checkout, answer: str, status: int, flags: list[str], environment: dict[str, str]
):
    show(checkout, answer, status)
    assert used(checkout, *flags, **environment) == (".venv .[cpu,export]", ON_CPU)


def test_without_nvidia_smi(checkout: Checkout):
    assert used(checkout, "--model", "qwen2.5-coder-0.5b", PASS_WEIGHTS="int4") == (
        ".venv .[cpu,export]",
        [
            call.replace("smollm2-135m", "qwen2.5-coder-0.5b").replace("w8a8", "int4")
            for call in ON_CPU
        ],
    )


def test_a_second_run_exports_nothing(checkout: Checkout):
    show(checkout, SMI)
    checkout.program(checkout.root / "build/smollm2-135m-fp16/pass_config.json", "{}")
    assert used(checkout)[1] == ON_GPU[1:]


@pytest.mark.parametrize("flags", [["--gpu"], ["--model"]])
def test_usage(checkout: Checkout, flags: list[str]):
    status, calls, said = checkout.run("scripts/demo.sh", *flags)
    assert status != 0 and not calls and "usage: scripts/demo.sh [--model NAME] [--cpu]" in said


def test_an_environment_has_one_onnxruntime(checkout: Checkout):
    checkout.program(
        checkout.root / "scripts/some.sh",
        "set -eu\n. scripts/environment.sh\nenvironment $EXTRAS\n",
    )
    assert checkout.run("scripts/some.sh", EXTRAS="cpu export")[0] == 0
    status, calls, said = checkout.run("scripts/some.sh", EXTRAS="gpu")
    assert status == 2 and not any("pip" in call for call in calls) and "VENV=.venv-gpu" in said


def test_the_real_question():
    """What has_gpu asks the driver's library has an answer, and prints nothing, whatever this
    machine has."""
    command = ". scripts/environment.sh; PATH=/usr/bin:/bin PYTHON=$1 has_gpu 2>&1"
    environment = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }
    done = subprocess.run(
        ["bash", "-c", command, "-", sys.executable], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode in (0, 1) and done.stdout == b""
