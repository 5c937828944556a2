"""Which commands scripts/test.sh, environment.sh, demo.sh and .ci/run call."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDER = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$CALLS"
[[ "$(basename "$0") $*" != ${FAILS:-none}* ]]
"""
"""Appends its name and arguments to the file CALLS, and fails if they begin with FAILS."""
PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && { echo "${VERSION:-3.12}"; exit; }
[ "$1" = - ] && { cat >/dev/null; exit "${STATUS_OF_STDIN:-0}"; }
[ "$1" = runtime/kernels/build.py ] && exit "${KERNELS:-0}"
echo "$(basename "$(dirname "$(dirname "$0")")")/python $*" | sed "s|$PWD/||g" >>"$CALLS"
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "${@: -1}/bin"
    for name in pytest ruff mypy pass-export pass-run; do cp "$RECORDERS" "${@: -1}/bin/$name"; done
    cp "$0" "${@: -1}/bin/python"
fi
"""
"""Records calls with a file or module. `-` ends with STATUS_OF_STDIN, the kernels' build with
KERNELS, and `-m venv` makes an environment of recorders."""
SCRIPTS = ("scripts/test.sh", "scripts/demo.sh", "scripts/environment.sh", ".ci/run")
UNSET = ("CI", "PASS_TEST_BUNDLE", "PYTEST_WORKERS", "PYTHON", "VENV", "OLDEST_PYTHON")


class Checkout:
    """A directory with copies of SCRIPTS, in which all other programs record their calls."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, root / "calls"
        for name in (*SCRIPTS, "pyproject.toml", "constraints.txt"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        (root / "tests").mkdir()
        for name in ("build_cpp.sh", "check_cpp.sh", "docs.sh", "install_triton.sh"):
            self.program(f"scripts/{name}", RECORDER)
        self.program("recorder", RECORDER)
        self.program("bin/python3", PYTHON)
        for kind in ("address-undefined", "thread"):
            self.program(f"build/cpp/{kind}/pass-tests", RECORDER)
        for name in ("clang-format", "clang-tidy", "chromium", "qemu-x86_64"):
            self.program(f"bin/{name}", "#!/bin/sh\necho version 14.0\n")
        self.program("bin/uname", "#!/bin/sh\necho x86_64\n")

    def program(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(
        self, script: str, *arguments: str, status: int = 0, **environment: str
    ) -> tuple[list[str], str]:
        """Return the recorded calls and stderr of a script, which must end with `status`."""
        self.calls.write_text("")
        changed = {
            "CALLS": str(self.calls),
            "RECORDERS": str(self.root / "recorder"),
            "PATH": f"{self.root}/bin:/usr/bin:/bin",
        }
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        done = subprocess.run(
            ["bash", self.root / script, *arguments],
            cwd=self.root,
            env=kept | changed | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
        return self.calls.read_text().splitlines(), done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def pytest_calls(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("pytest")]


CHECKS = ["ruff check .", "ruff format --check .", "mypy "]
PYTEST = "pytest -n 2 --dist loadfile"
CPP = [
    "build_cpp.sh ",
    *("check_cpp.sh get clang-format", "check_cpp.sh format"),
    *("check_cpp.sh get clang-tidy", "check_cpp.sh tidy"),
    f"{PYTEST} tests/cpp",
]
CPP_FILES = " ".join(f"tests/cpp/test_cpp_{name}.py" for name in ("trt", "captures", "replay"))
CPP_PROGRAMS = "pass-tests fake_gpu fake_ort replay"
SANITIZED = [
    f"build_cpp.sh --sanitize address,undefined --target {CPP_PROGRAMS} --no-tests",
    "pass-tests ",
    f"{PYTEST} {CPP_FILES} -k writes or fails or counts or int4",
    "build_cpp.sh --sanitize thread --target pass-tests --no-tests",
    "pass-tests ",
]


@pytest.mark.parametrize(
    ("suite", "expected"),
    [
        ("", [*CHECKS, f"{PYTEST} --no-loadscope-reorder"]),
        ("-m slow --all", [*CHECKS, f"{PYTEST} --no-loadscope-reorder -m slow --all"]),
        ("usual tests/docs", [*CHECKS, f"{PYTEST} --no-loadscope-reorder tests/docs"]),
        ("tests/docs", [*CHECKS, f"{PYTEST} --no-loadscope-reorder tests/docs"]),
        ("cpp", CPP),
        ("cpp --sanitizers", [*CPP, *SANITIZED]),
        (
            "triton -x",
            [
                "install_triton.sh ",
                "pytest tests/serve/test_triton.py -x",
            ],
        ),
        ("ray -x", ["pytest tests/serve/test_ray.py -x"]),
        ("page -x", ["pytest -n 0 tests/page/in_browser.py -x"]),
        ("cpus -x", ["pytest -n 0 tests/cpus/on_cpus.py -x"]),
        ("docs", ["docs.sh --strict"]),
    ],
)
def test_a_suite_calls(checkout: Checkout, suite: str, expected: list[str]):
    calls, errors = checkout.run("scripts/test.sh", *suite.split())
    assert calls[-len(expected) :] == expected
    if suite != "docs":
        assert "installing into .venv" in errors
    assert ("into .venv-ray" in errors) == suite.startswith("ray")
    again, errors = checkout.run("scripts/test.sh", *suite.split(), PYTEST_WORKERS="3")
    assert errors == "" and again == [call.replace("-n 2", "-n 3") for call in expected]


@pytest.mark.parametrize(
    ("suite", "program", "message"),
    [
        ("cpp", ("scripts/build_cpp.sh", "exit 2"), "NOT TESTED: the C++ runtime\n"),
        ("triton", ("scripts/install_triton.sh", "exit 1"), "NOT TESTED: Triton\n"),
        ("cpus", ("bin/uname", "#!/bin/sh\necho aarch64\n"), "NOT TESTED: other CPUs"),
        ("ranges", None, "NOT TESTED: the oldest versions"),
    ],
)
def test_a_suite_whose_programs_are_missing_is_skipped(checkout, suite, program, message):
    if program:
        checkout.program(*program)
    calls, errors = checkout.run("scripts/test.sh", suite, OLDEST_PYTHON="none")
    assert not pytest_calls(calls) and message in errors


def test_what_is_wrong_fails_a_suite(checkout: Checkout):
    for fails in ("ruff format", "mypy", "pytest"):
        calls, _ = checkout.run("scripts/test.sh", FAILS=fails, status=1)
        assert calls[-1].startswith(fails)
    checkout.run("scripts/test.sh", "cpp", FAILS="pytest", status=1)
    checkout.program("scripts/build_cpp.sh", "exit 1")
    checkout.run("scripts/test.sh", "cpp", status=1)
    checkout.run("scripts/test.sh", "ranges", CI="1", OLDEST_PYTHON="none", status=2)
    reason = "error: no suite is called c++; see scripts/test.sh --help\n"
    assert checkout.run("scripts/test.sh", "c++", status=2) == ([], reason)


def test_other_versions_of_clang_tools_check_nothing(checkout: Checkout):
    checkout.program("bin/clang-tidy", "#!/bin/sh\necho version 19.1\n")
    calls, errors = checkout.run("scripts/test.sh", "cpp")
    assert "check_cpp.sh tidy" not in calls
    assert "NOT CHECKED: the C++ runtime by clang-tidy 14" in errors


def test_without_a_compiler_tests_run_but_not_if_the_kernels_do_not_compile(checkout: Checkout):
    calls, errors = checkout.run("scripts/test.sh", KERNELS="2")
    assert pytest_calls(calls) and "NOT TESTED: the CPU kernels" in errors
    assert not pytest_calls(checkout.run("scripts/test.sh", KERNELS="1", status=1)[0])


def test_the_ranges_suite_runs_with_the_oldest_versions(checkout: Checkout):
    python = str(checkout.root / "bin/python3")
    calls, errors = checkout.run("scripts/test.sh", "ranges", OLDEST_PYTHON=python)
    assert "installing into .venv-oldest" in errors
    assert pytest_calls(calls) == ["pytest -q tests/ranges/record.py"]
    files = "ranges/compare.py runtime cli --ignore runtime/test_manifest_schema.py"
    flags = f"--noconftest -p without_exporter {files}"
    assert calls[-1] == f".venv-oldest/python -m pytest -q -n 2 --dist loadfile {flags}"
    calls, _ = checkout.run("scripts/test.sh", "ranges", OLDEST_PYTHON=python)
    assert not any("pip" in call for call in calls)


def test_an_environment_keeps_its_extras(checkout: Checkout):
    """Extras that are there are not installed again, new ones remove none, and an environment has
    one build of ONNX Runtime."""
    source = ". scripts/environment.sh\nset -euo pipefail\nenvironment $EXTRAS\n"
    checkout.program("scripts/some.sh", source)
    for extras, installed in (
        ("cpu", "cpu"),
        ("serve cpu", "cpu serve"),
        ("cpu", ""),
        ("", ""),
        ("ray", "cpu ray serve"),
    ):
        calls, errors = checkout.run("scripts/some.sh", EXTRAS=extras)
        if installed:
            assert errors.endswith(f"extras: {installed})\n")
            assert calls[-1].endswith(f"--editable .[{installed.replace(' ', ',')}]")
        else:
            assert errors == "" and not any("pip" in call for call in calls)
    calls, errors = checkout.run("scripts/some.sh", EXTRAS="gpu", status=2)
    assert not any("pip" in call for call in calls) and "VENV=.venv-gpu" in errors
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    calls, _ = checkout.run("scripts/some.sh", EXTRAS="cpu")
    assert calls[-1].endswith("--editable .[cpu,ray,serve]")


def test_ci_runs_the_quick_start_and_every_suite_but_ray(checkout: Checkout):
    """All suites share one folder with the exported default model, which is removed at the end."""
    checkout.program("scripts/demo.sh", RECORDER)
    in_folder = RECORDER.replace(">>", '${PASS_TEST_BUNDLE:+" in $PASS_TEST_BUNDLE"} >>')
    checkout.program("recorder", in_folder)
    calls, errors = checkout.run(".ci/run", OLDEST_PYTHON=str(checkout.root / "bin/python3"))
    assert calls[0] == "demo.sh "
    starts = [line for line in errors.splitlines() if line.startswith("== ")]
    suites = ("usual", "page", "docs", "triton", "cpp --sanitizers", "cpus", "ranges")
    assert starts == [f"== scripts/test.sh {suite}" for suite in suites]
    assert any(call.startswith("docs.sh --strict") for call in calls)
    folders = {call.partition(" in ")[2] for call in pytest_calls(calls)}
    assert len(pytest_calls(calls)) == 7 and len(folders) == 1 and not Path(*folders).exists()
    for fails in ("demo.sh", "pytest tests/serve"):
        checkout.run(".ci/run", FAILS=fails, status=1)


SMI = "GPU 0: NVIDIA H200 (UUID: GPU-1)"
NO_GPU = "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."


def demo_calls(device: str, model: str = "smollm2-135m", weights: str = "int4") -> list[str]:
    """Return what the demo installs, and its calls without flags after the device."""
    is_gpu = device == "cuda"
    bundle = f"build/{model}-{'fp16' if is_gpu else weights}"
    format = "--dtype fp16" if is_gpu else f"--weights {weights}"
    return [
        ".venv-gpu .[export,gpu,serve]" if is_gpu else ".venv .[cpu,export,serve]",
        f"pass-export --model {model} --lookahead 4 {format} --output {bundle}",
        f"pass-run generate {bundle} --device {device}",
        f"pass-run bench {bundle} --device {device}",
    ]


@pytest.mark.parametrize(
    ("smi", "flags", "environment", "expected"),
    [
        (SMI, "", {}, demo_calls("cuda")),
        (None, "", {"STATUS_OF_STDIN": "0"}, demo_calls("cuda")),  # the driver counts a GPU
        (SMI, "--cpu", {}, demo_calls("cpu")),
        (SMI, "", {"CUDA_VISIBLE_DEVICES": ""}, demo_calls("cpu")),
        (SMI, "", {"CUDA_VISIBLE_DEVICES": "-1"}, demo_calls("cpu")),
        (NO_GPU, "", {}, demo_calls("cpu")),
        ("No devices were found", "", {}, demo_calls("cpu")),
        (None, "", {"KERNELS": "1"}, demo_calls("cpu")),  # the kernels do not compile
        (None, "", {"KERNELS": "2"}, demo_calls("cpu")),  # there is no compiler
        (
            None,
            "--model qwen2.5-coder-0.5b",
            {"PASS_WEIGHTS": "int8"},
            demo_calls("cpu", "qwen2.5-coder-0.5b", "int8"),
        ),
    ],
)
def test_the_demo_runs_on_the_gpu_if_there_is_one(checkout, smi, flags, environment, expected):
    if smi:
        checkout.program("bin/nvidia-smi", f"#!/bin/sh\necho '{smi}'\n")
    variables = {"STATUS_OF_STDIN": "1"} | environment
    calls, _ = checkout.run("scripts/demo.sh", *flags.split(), **variables)
    (installed,) = [call for call in calls if "pip install" in call]
    name, *_, package = installed.replace("/", " ").split()
    toolkit = [call.split(" --chat")[0] for call in calls if call.startswith("pass-")]
    assert [f"{name} {package}", *toolkit] == expected
    checkout.program(f"{expected[1].split()[-1]}/pass_config.json", "{}")
    calls, _ = checkout.run("scripts/demo.sh", *flags.split(), **variables)  # exports nothing
    assert [call.split(" --chat")[0] for call in calls] == expected[2:]


@pytest.mark.parametrize("flag", ["--gpu", "--model"])
def test_unknown_flags_of_the_demo_print_the_usage(checkout: Checkout, flag: str):
    calls, errors = checkout.run("scripts/demo.sh", flag, status=2 if flag == "--gpu" else 1)
    assert not calls and "usage: scripts/demo.sh [--model NAME] [--cpu]" in errors
