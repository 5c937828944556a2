"""Which commands the suites of scripts/test.sh and .ci/run call. All other programs are replaced by
ones that only record their arguments."""

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
"""A program that appends its name and arguments to the file CALLS, and fails if they begin with the
variable FAILS."""
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
"""A Python that records calls with a file or module. `-c` prints VERSION, `-` ends with the status
STATUS_OF_STDIN, the kernels' build with KERNELS, and `-m venv` makes an environment whose programs
are recorders."""


class Checkout:
    """A directory with copies of scripts/test.sh, environment.sh and .ci/run, in which all other
    programs record their calls in the file `calls`."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, root / "calls"
        (root / "scripts").mkdir()
        (root / ".ci").mkdir()
        (root / "tests").mkdir()
        for name in ("scripts/test.sh", "scripts/environment.sh", ".ci/run"):
            self.copy(name)
        for name in ("pyproject.toml", "constraints.txt"):
            self.copy(name)
        for name in ("build_cpp.sh", "check_cpp.sh", "demo.sh", "docs.sh", "install_triton.sh"):
            self.program(root / "scripts" / name, RECORDER)
        self.program(root / "recorder", RECORDER)
        self.program(root / "bin" / "python3", PYTHON)
        for kind in ("address-undefined", "thread"):
            self.program(root / "build/cpp" / kind / "pass-tests", RECORDER)
        for name in ("clang-format", "clang-tidy", "chromium", "qemu-x86_64"):
            self.program(root / "bin" / name, "#!/bin/sh\necho version 14.0\n")

    def copy(self, name: str) -> None:
        """Copy a file of the repository."""
        shutil.copy(ROOT / name, self.root / name)

    def program(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> tuple[int, list[str], str]:
        """Run a script. Return its exit status, the recorded calls, and stderr."""
        self.calls.write_text("")
        changed = {
            "CALLS": str(self.calls),
            "RECORDERS": str(self.root / "recorder"),
            "PATH": f"{self.root}/bin:/usr/bin:/bin",
        }
        unset = ("CI", "PASS_TEST_BUNDLE", "PYTEST_WORKERS", "PYTHON", "VENV", "OLDEST_PYTHON")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        done = subprocess.run(
            ["bash", self.root / script, *arguments],
            cwd=self.root,
            env=kept | changed | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, self.calls.read_text().splitlines(), done.stderr

    def suite(
        self, *arguments: str, expected: int = 0, **environment: str
    ) -> tuple[list[str], str]:
        """Run scripts/test.sh, assert its exit status, and return the calls and stderr."""
        status, calls, errors = self.run("scripts/test.sh", *arguments, **environment)
        assert status == expected, errors
        return calls, errors


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def pytest_calls(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("pytest")]


CHECKS = ["ruff check .", "ruff format --check .", "mypy "]
PYTEST = "pytest -n 2 --dist loadfile"


def test_without_a_suite_checks_and_all_tests_run(checkout: Checkout):
    """Lint, types and all tests run, after an install. The second run installs nothing."""
    calls, errors = checkout.suite()
    assert calls[-4:] == [*CHECKS, f"{PYTEST} --no-loadscope-reorder"]
    extras = "cpu dev export peers serve tensorrt-rtx"
    assert f"installing into .venv (versions of constraints.txt; extras: {extras}" in errors
    calls, errors = checkout.suite("-m", "not slow", "--all", PYTEST_WORKERS="3")
    assert errors == ""
    assert calls == [
        *CHECKS,
        "pytest -n 3 --dist loadfile --no-loadscope-reorder -m not slow --all",
    ]
    assert checkout.suite("tests/docs")[0][-1].endswith("reorder tests/docs")


@pytest.mark.parametrize("fails", ["ruff format", "mypy", "pytest"])
def test_a_failed_command_fails_the_suite(checkout: Checkout, fails: str):
    calls, _ = checkout.suite(expected=1, FAILS=fails)
    assert calls[-1].startswith(fails)


def test_without_a_compiler_tests_run_but_not_if_the_kernels_do_not_compile(checkout: Checkout):
    calls, errors = checkout.suite(KERNELS="2")
    assert pytest_calls(calls) and "NOT TESTED: the CPU kernels" in errors
    assert not pytest_calls(checkout.suite(expected=1, KERNELS="1")[0])


def test_an_unknown_suite_is_refused(checkout: Checkout):
    reason = "error: no suite is called c++; see scripts/test.sh --help\n"
    assert checkout.suite("c++", expected=2) == ([], reason)


def test_the_cpp_suite_builds_and_checks_and_tests(checkout: Checkout):
    plain = [
        "build_cpp.sh ",
        *("check_cpp.sh get clang-format", "check_cpp.sh format"),
        *("check_cpp.sh get clang-tidy", "check_cpp.sh tidy"),
        f"{PYTEST} tests/cpp",
    ]
    assert checkout.suite("cpp")[0][-6:] == plain
    calls, _ = checkout.suite("cpp", "--sanitizers")
    sanitize = "build_cpp.sh --sanitize"
    files = " ".join(f"tests/cpp/test_cpp_{name}.py" for name in ("trt", "captures", "replay"))
    fakes = f"{files} -k writes or fails or counts or int4"
    assert calls[:6] == plain
    assert calls[6:] == [
        f"{sanitize} address,undefined --target pass-tests fake_gpu fake_ort replay --no-tests",
        "pass-tests ",
        f"{PYTEST} {fakes}",
        f"{sanitize} thread --target pass-tests --no-tests",
        "pass-tests ",
    ]
    checkout.suite("cpp", expected=1, FAILS="pytest")


def test_a_suite_whose_programs_are_missing_is_skipped(checkout: Checkout):
    """And a message says so. Status 2 of build_cpp.sh means that a program is missing. An error of
    the compiler, status 1, fails the suite."""
    checkout.program(checkout.root / "scripts/build_cpp.sh", "exit 2")
    calls, errors = checkout.suite("cpp")
    assert not pytest_calls(calls) and errors.endswith("NOT TESTED: the C++ runtime\n")
    checkout.program(checkout.root / "scripts/build_cpp.sh", "exit 1")
    checkout.suite("cpp", expected=1)
    calls, errors = checkout.suite("triton", FAILS="install_triton")
    assert not pytest_calls(calls) and errors.endswith("NOT TESTED: Triton\n")
    checkout.program(checkout.root / "bin/clang-tidy", "#!/bin/sh\necho version 19.1\n")
    checkout.program(checkout.root / "scripts/build_cpp.sh", RECORDER)
    calls, errors = checkout.suite("cpp")
    assert "check_cpp.sh tidy" not in calls
    assert "NOT CHECKED: the C++ runtime by clang-tidy 14" in errors


def test_suites_of_pytest_get_its_options(checkout: Checkout):
    files = "tests/serve/test_triton.py tests/serve/test_triton_stop.py"
    calls, _ = checkout.suite("triton", "-x")
    assert calls[-2:] == ["install_triton.sh ", f"pytest {files} -x"]
    calls, errors = checkout.suite("ray", "-x")
    assert calls[-1] == "pytest tests/serve/test_ray.py -x" and "into .venv-ray" in errors
    calls, _ = checkout.suite("page", "-x")
    assert calls[-1] == "pytest -n 0 tests/page/in_browser.py -x"


def test_the_cpus_suite_runs_on_x86_64_only(checkout: Checkout):
    """It runs on x86-64 only."""
    checkout.program(checkout.root / "bin/uname", "#!/bin/sh\necho x86_64\n")
    calls, _ = checkout.suite("cpus", "-x")
    assert calls[-1] == "pytest -n 0 tests/cpus/on_cpus.py -x"
    checkout.program(checkout.root / "bin/uname", "#!/bin/sh\necho aarch64\n")
    calls, errors = checkout.suite("cpus")
    assert not pytest_calls(calls) and errors.startswith("NOT TESTED: other CPUs")


def test_the_ranges_suite_runs_with_the_oldest_versions(checkout: Checkout):
    python = str(checkout.root / "bin/python3")
    calls, errors = checkout.suite("ranges", OLDEST_PYTHON=python)
    assert "installing into .venv-oldest" in errors
    assert pytest_calls(calls) == ["pytest -q tests/ranges/record.py"]
    flags = (
        "--noconftest -p without_exporter ranges/compare.py runtime cli --ignore "
        "runtime/test_manifest_schema.py"
    )
    assert calls[-1] == f".venv-oldest/python -m pytest -q -n 2 --dist loadfile {flags}"
    calls, _ = checkout.suite("ranges", OLDEST_PYTHON=python)
    assert not any("pip" in call for call in calls)


def test_without_an_old_python_only_ci_fails(checkout: Checkout):
    for environment, expected in (({}, 0), ({"CI": "1"}, 2)):
        environment |= {"OLDEST_PYTHON": "none"}
        calls, errors = checkout.suite("ranges", expected=expected, **environment)
        assert not pytest_calls(calls) and "NOT TESTED with the oldest versions" in errors


def test_an_environment_keeps_its_extras(checkout: Checkout):
    """Extras that are there are not installed again, and new ones remove none."""
    for extras, installed in (
        ("export", "export"),
        ("serve export", "export serve"),
        ("export", ""),
        ("", ""),
        ("ray", "export ray serve"),
    ):
        checkout.program(
            checkout.root / "scripts/some.sh",
            f". scripts/environment.sh\nset -euo pipefail\nenvironment {extras}",
        )
        status, calls, errors = checkout.run("scripts/some.sh")
        assert status == 0, errors
        if installed:
            assert errors.endswith(f"extras: {installed})\n")
            assert calls[-1].endswith(f"--editable .[{installed.replace(' ', ',')}]")
        else:
            assert errors == "" and not any("pip" in call for call in calls)
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert checkout.run("scripts/some.sh")[1][-1].endswith("--editable .[export,ray,serve]")


def test_ci_runs_the_quick_start_and_every_suite_but_ray(checkout: Checkout):
    """All suites share one folder with the exported default model, which is removed at the end."""
    recorder = RECORDER.replace(">>", '${PASS_TEST_BUNDLE:+" in $PASS_TEST_BUNDLE"} >>')
    checkout.program(checkout.root / "recorder", recorder)
    status, calls, errors = checkout.run(
        ".ci/run", OLDEST_PYTHON=str(checkout.root / "bin/python3")
    )
    assert status == 0, errors
    assert calls[0] == "demo.sh "
    starts = [line for line in errors.splitlines() if line.startswith("== ")]
    suites = ("usual", "page", "docs", "triton", "cpp --sanitizers", "cpus", "ranges")
    assert starts == [f"== scripts/test.sh {suite}" for suite in suites]
    assert any(call.startswith("docs.sh --strict") for call in calls)
    folders = {call.partition(" in ")[2] for call in pytest_calls(calls)}
    assert len(pytest_calls(calls)) == 7 and len(folders) == 1 and not Path(*folders).exists()
    for fails in ("demo.sh", "pytest tests/serve"):
        assert checkout.run(".ci/run", FAILS=fails)[0] == 1
