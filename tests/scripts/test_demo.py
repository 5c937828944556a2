"""scripts/demo.sh on machines with and without a GPU. The programs that it runs only record their
arguments, and nvidia-smi is a fake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_suites import ROOT, Checkout

SMI = "GPU 0: NVIDIA H200 (UUID: GPU-1)"
NO_GPU = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."
FP16, INT4 = "build/smollm2-135m-fp16", "build/smollm2-135m-int4"
ON_GPU = [
    f"pass-export --model smollm2-135m --lookahead 4 --dtype fp16 --output {FP16}",
    f"pass-run generate {FP16} --device cuda",
    f"pass-run bench {FP16} --device cuda",
]
ON_CPU = [
    f"pass-export --model smollm2-135m --lookahead 4 --weights int4 --output {INT4}",
    f"pass-run generate {INT4} --device cpu",
    f"pass-run bench {INT4} --device cpu",
]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A copy of the scripts on a machine without nvidia-smi and libcuda."""
    made = Checkout(tmp_path)
    made.copy("scripts/demo.sh")
    return made


def add_nvidia_smi(checkout: Checkout, answer: str, status: int = 0) -> None:
    program = f"#!/bin/sh\necho '{answer}'\nexit {status}\n"
    checkout.program(checkout.root / "bin/nvidia-smi", program)


def run_demo(checkout: Checkout, *flags: str, **environment: str) -> tuple[str, list[str]]:
    """Run the script. Return where pip installs and what ("ENVIRONMENT PACKAGE"), and the calls of
    pass-export and pass-run, without flags after the device.

    STATUS_OF_STDIN is the exit status of the program that asks the driver for GPUs: 0 if it finds
    one.
    """
    environment = {"STATUS_OF_STDIN": "1"} | environment
    status, calls, errors = checkout.run("scripts/demo.sh", *flags, **environment)
    assert status == 0, errors
    (installed,) = [call for call in calls if "pip install" in call]
    environment_name, *_, package = installed.replace("/", " ").split()
    toolkit_calls = [call.split(" --chat")[0] for call in calls if call.startswith("pass-")]
    return f"{environment_name} {package}", toolkit_calls


def test_a_gpu_that_nvidia_smi_shows_is_used(checkout: Checkout):
    """It gets its own virtual environment, with the extra gpu."""
    add_nvidia_smi(checkout, SMI)
    assert run_demo(checkout) == (".venv-gpu .[export,gpu,serve]", ON_GPU)


def test_a_gpu_that_the_driver_counts_is_used(checkout: Checkout):
    """A container may have no nvidia-smi."""
    assert run_demo(checkout, STATUS_OF_STDIN="0") == (".venv-gpu .[export,gpu,serve]", ON_GPU)


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
    add_nvidia_smi(checkout, answer, status)
    assert run_demo(checkout, *flags, **environment) == (".venv .[cpu,export,serve]", ON_CPU)


def test_without_nvidia_smi_the_chosen_model_runs_on_the_cpu(checkout: Checkout):
    installed, calls = run_demo(checkout, "--model", "qwen2.5-coder-0.5b", PASS_WEIGHTS="int8")
    assert installed == ".venv .[cpu,export,serve]"
    names = ("smollm2-135m", "qwen2.5-coder-0.5b")
    assert calls == [call.replace(*names).replace("int4", "int8") for call in ON_CPU]


def test_a_second_run_exports_nothing(checkout: Checkout):
    add_nvidia_smi(checkout, SMI)
    checkout.program(checkout.root / "build/smollm2-135m-fp16/pass_config.json", "{}")
    assert run_demo(checkout)[1] == ON_GPU[1:]


@pytest.mark.parametrize("status", ["1", "2"])
def test_without_kernels_the_demo_goes_on(checkout: Checkout, status: str):
    """2: there is no compiler; 1: it does not compile them."""
    assert run_demo(checkout, KERNELS=status)[1] == ON_CPU


@pytest.mark.parametrize("flags", [["--gpu"], ["--model"]])
def test_unknown_flags_print_the_usage(checkout: Checkout, flags: list[str]):
    status, calls, errors = checkout.run("scripts/demo.sh", *flags)
    assert status != 0 and not calls and "usage: scripts/demo.sh [--model NAME] [--cpu]" in errors


def test_an_environment_has_one_build_of_onnxruntime(checkout: Checkout):
    checkout.program(
        checkout.root / "scripts/some.sh",
        "set -eu\n. scripts/environment.sh\nenvironment $EXTRAS\n",
    )
    assert checkout.run("scripts/some.sh", EXTRAS="cpu export")[0] == 0
    status, calls, errors = checkout.run("scripts/some.sh", EXTRAS="gpu")
    assert status == 2 and not any("pip" in call for call in calls) and "VENV=.venv-gpu" in errors


def test_the_real_check_for_a_gpu_prints_nothing():
    command = ". scripts/environment.sh; PATH=/usr/bin:/bin PYTHON=$1 has_gpu 2>&1"
    environment = dict(os.environ)
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        ["bash", "-c", command, "-", sys.executable], cwd=ROOT, env=environment, capture_output=True
    )
    assert done.returncode in (0, 1) and done.stdout == b""
