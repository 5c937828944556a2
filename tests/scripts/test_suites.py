"""scripts/test.sh and .ci/run: which suite runs what, with programs that only write down how they
were called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDER = (
    '#!/usr/bin/env bash\necho "$(basename "$0") $*" >>"$CALLS"\n[[ "$(basename "$0") '
    '$*" != ${FAILS:-none}* ]]\n'
)
PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && { echo "${VERSION:-3.12}"; exit; }
[ "$1" = - ] && { cat >/dev/null; exit "${STATUS_OF_STDIN:-0}"; }
echo "$(basename "$(dirname "$(dirname "$0")")")/python $*" | sed "s|$PWD/||g" >>"$CALLS"
if [ "$1 $2" = "-m venv" ]; then
    mkdir -p "${@: -1}/bin"
    for name in pytest ruff mypy pass-export pass-run; do cp "$RECORDERS" "${@: -1}/bin/$name"; done
    cp "$0" "${@: -1}/bin/python"
fi
[ -z "${SAYS_BUNDLES:-}" ] || [ "${3:-}" != pytest ] || echo "$PASS_TEST_BUNDLE" >>"$CALLS"
"""


class Checkout:
    """A copy of the scripts in which nothing is real but scripts/test.sh, environment.sh and
    .ci/run."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, root / "calls"
        (root / "scripts").mkdir()
        (root / ".ci").mkdir()
        (root / "tests").mkdir()
        for name in (
            "scripts/test.sh",
            "scripts/environment.sh",
            ".ci/run",
            "pyproject.toml",
            "constraints.txt",
        ):
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
        """Make a file the repository's own."""
        shutil.copy(ROOT / name, self.root / name)

    def program(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **environment: str) -> tuple[int, list[str], str]:
        """Status, the calls, and stderr."""
        self.calls.write_text("")
        own = {
            "CALLS": str(self.calls),
            "RECORDERS": str(self.root / "recorder"),
            "PATH": f"{self.root}/bin:/usr/bin:/bin",
        }
        unset = ("CI", "PASS_TEST_BUNDLE", "PYTEST_WORKERS", "PYTHON", "VENV", "OLDEST_PYTHON")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        command = ["bash", self.root / script, *arguments]
        environment = kept | own | environment
        done = subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, self.calls.read_text().splitlines(), done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def pytest_calls(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("pytest")]


USUAL = ["ruff check .", "ruff format --check .", "mypy "]
PYTEST = "pytest -n 2 --dist loadfile"


def test_without_a_suite(checkout: Checkout):
    """Lint, types and all tests, after an install that says what it does; the second call installs
    nothing."""
    status, calls, said = checkout.run("scripts/test.sh")
    assert status == 0, said
    assert calls[-4:] == [*USUAL, f"{PYTEST} --no-loadscope-reorder"]
    assert (
        "installing into .venv (versions of constraints.txt; extras: cpu dev export peers "
        "serve tensorrt-rtx" in said
    )
    status, calls, said = checkout.run(
        "scripts/test.sh", "-m", "not slow", "--all", PYTEST_WORKERS="3"
    )
    assert status == 0 and said == ""
    assert calls == [*USUAL, "pytest -n 3 --dist loadfile --no-loadscope-reorder -m not slow --all"]
    assert checkout.run("scripts/test.sh", "tests/docs")[1][-1].endswith("reorder tests/docs")


@pytest.mark.parametrize("fails", ["ruff format", "mypy", "pytest"])
def test_a_failure_is_a_failure(checkout: Checkout, fails: str):
    status, calls, _ = checkout.run("scripts/test.sh", FAILS=fails)
    assert status == 1 and calls[-1].startswith(fails)


def test_an_unknown_suite(checkout: Checkout):
    status, calls, said = checkout.run("scripts/test.sh", "c++")
    assert (
        status == 2
        and not calls
        and said == "error: no suite is called c++; see scripts/test.sh --help\n"
    )


def test_the_cpp_suite(checkout: Checkout):
    plain = [
        "build_cpp.sh ",
        "check_cpp.sh get clang-format",
        "check_cpp.sh format",
        "check_cpp.sh get clang-tidy",
    ]
    plain += ["check_cpp.sh tidy", f"{PYTEST} tests/cpp"]
    status, calls, _ = checkout.run("scripts/test.sh", "cpp")
    assert status == 0 and calls[-6:] == plain
    status, calls, _ = checkout.run("scripts/test.sh", "cpp", "--sanitizers")
    assert status == 0 and calls[:6] == plain
    assert calls[6:] == [
        (
            "build_cpp.sh --sanitize address,undefined --target pass-tests fake_gpu fake_ort "
            "--no-tests"
        ),
        "pass-tests ",
        (
            f"{PYTEST} tests/cpp/test_cpp_trt.py tests/cpp/test_cpp_captures.py -k writes or fails "
            "or counts"
        ),
        "build_cpp.sh --sanitize thread --target pass-tests --no-tests",
        "pass-tests ",
    ]
    status, calls, _ = checkout.run("scripts/test.sh", "cpp", FAILS="pytest")
    assert status == 1


def test_what_a_machine_lacks_is_not_tested(checkout: Checkout):
    """And said; a compiler's error is another matter."""
    checkout.program(checkout.root / "scripts/build_cpp.sh", "exit 2")
    status, calls, said = checkout.run("scripts/test.sh", "cpp")
    assert (
        status == 0 and not pytest_calls(calls) and said.endswith("NOT TESTED: the C++ runtime\n")
    )
    checkout.program(checkout.root / "scripts/build_cpp.sh", "exit 1")
    assert checkout.run("scripts/test.sh", "cpp")[0] == 1
    status, calls, said = checkout.run("scripts/test.sh", "triton", FAILS="install_triton")
    assert status == 0 and not pytest_calls(calls) and said.endswith("NOT TESTED: Triton\n")
    checkout.program(checkout.root / "bin/clang-tidy", "#!/bin/sh\necho version 19.1\n")
    checkout.program(checkout.root / "scripts/build_cpp.sh", RECORDER)
    status, calls, said = checkout.run("scripts/test.sh", "cpp")
    assert (
        status == 0
        and "check_cpp.sh tidy" not in calls
        and "NOT CHECKED: the C++ runtime by clang-tidy 14" in said
    )


def test_suites_with_environments_of_their_own(checkout: Checkout):
    status, calls, _ = checkout.run("scripts/test.sh", "triton", "-x")
    assert status == 0
    assert calls[-2:] == [
        "install_triton.sh ",
        "pytest tests/serve/test_triton.py tests/serve/test_triton_stop.py -x",
    ]
    status, calls, said = checkout.run("scripts/test.sh", "ray", "-x")
    assert (
        status == 0
        and calls[-1] == "pytest tests/serve/test_ray.py -x"
        and "into .venv-ray" in said
    )
    status, calls, _ = checkout.run("scripts/test.sh", "page", "-x")
    assert status == 0 and calls[-1] == "pytest -n 0 tests/page/in_browser.py -x"
    checkout.program(checkout.root / "bin/uname", "#!/bin/sh\necho x86_64\n")
    status, calls, said = checkout.run("scripts/test.sh", "cpus", "-x")
    assert status == 0 and calls[-1] == "pytest -n 0 tests/cpus/on_cpus.py -x"
    checkout.program(checkout.root / "bin/uname", "#!/bin/sh\necho aarch64\n")
    status, calls, said = checkout.run("scripts/test.sh", "cpus")
    assert status == 0 and not pytest_calls(calls) and said.startswith("NOT TESTED: other CPUs")
    checkout.program(checkout.root / "bin/uname", "#!/bin/sh\necho x86_64\n")
    oldest = checkout.root / "bin/python3"
    status, calls, said = checkout.run("scripts/test.sh", "ranges", OLDEST_PYTHON=str(oldest))
    assert status == 0 and "installing into .venv-oldest" in said
    assert pytest_calls(calls) == ["pytest -q tests/ranges/record.py"]
    flags = (
        "--noconftest -p without_exporter ranges/compare.py runtime cli --ignore "
        "runtime/test_manifest_schema.py"
    )
    assert calls[-1] == f".venv-oldest/python -m pytest -q -n 2 --dist loadfile {flags}"
    again = checkout.run("scripts/test.sh", "ranges", OLDEST_PYTHON=str(oldest))
    assert again[0] == 0 and not any("pip" in call for call in again[1])


def test_no_python_for_the_oldest_versions(checkout: Checkout):
    """It may be left out, but not by CI."""
    for ci, expected in (("", 0), ("1", 2)):
        status, calls, said = checkout.run(
            "scripts/test.sh", "ranges", OLDEST_PYTHON="none", **({"CI": ci} if ci else {})
        )
        assert (
            status == expected
            and not pytest_calls(calls)
            and "NOT TESTED with the oldest versions" in said
        )


def test_an_environment_keeps_its_extras(checkout: Checkout):
    """The quick start after the tests installs nothing, and the tests after the quick start take
    nothing away."""
    wanted = [
        ("export", "export"),
        ("serve export", "export serve"),
        ("export", ""),
        ("", ""),
        ("ray", "export ray serve"),
    ]
    for extras, installed in wanted:
        checkout.program(
            checkout.root / "scripts/some.sh",
            f". scripts/environment.sh\nset -euo pipefail\nenvironment {extras}",
        )
        status, calls, said = checkout.run("scripts/some.sh")
        assert status == 0, said
        if installed:
            assert said.endswith(f"extras: {installed})\n")
            assert calls[-1].endswith(f"--editable .[{installed.replace(' ', ',')}]")
        else:
            assert said == "" and not any("pip" in call for call in calls)
    with (checkout.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert checkout.run("scripts/some.sh")[1][-1].endswith("--editable .[export,ray,serve]")


def test_ci_runs_the_quick_start_and_every_suite_but_ray(checkout: Checkout):
    """In one environment, with one place for the export of the default model, which is removed
    afterwards."""
    recorder = RECORDER.replace(">>", '${PASS_TEST_BUNDLE:+" in $PASS_TEST_BUNDLE"} >>')
    checkout.program(checkout.root / "recorder", recorder)
    status, calls, said = checkout.run(".ci/run", OLDEST_PYTHON=str(checkout.root / "bin/python3"))
    assert status == 0, said
    assert calls[0] == "demo.sh "
    starts = [line for line in said.splitlines() if line.startswith("== ")]
    suites = ("usual", "page", "docs", "triton", "cpp --sanitizers", "cpus", "ranges")
    assert starts == [f"== scripts/test.sh {suite}" for suite in suites]
    assert any(call.startswith("docs.sh --strict") for call in calls)
    places = {call.partition(" in ")[2] for call in pytest_calls(calls)}
    assert len(pytest_calls(calls)) == 7 and len(places) == 1 and not Path(*places).exists()
    for fails in ("demo.sh", "pytest tests/serve"):
        assert checkout.run(".ci/run", FAILS=fails)[0] == 1
