"""runtime/kernels/build.py, as a program and as the hook of a wheel, with small sources."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from ctypes import CDLL
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "runtime/kernels/build.py"
NAME = "libpass_kernels.so"
SOURCE = """#include "answer.h"
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }
"""
RECORDER = f"""#!{sys.executable}
import pathlib, sys
if "-dumpmachine" in sys.argv:
    print("MACHINE-linux-gnu")
else:
    pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).touch()
    with open("CALLS", "a") as file:
        print(*sys.argv[1:], file=file)
"""
"""A compiler for MACHINE that writes its arguments to the file CALLS."""
NO_COMPILER = {"PATH": "/nonexistent"}
HAS_COMPILER = any(map(shutil.which, ("g++", "c++", "clang++")))

needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")


def environment(changed: dict[str, str]) -> dict[str, str]:
    unset = ("CXX", "CXXFLAGS", "PASS_KERNELS", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in unset} | changed


class Kernels:
    """A folder with build.py and sources of its own."""

    def __init__(self, root: Path) -> None:
        self.folder, self.library = root / "runtime/kernels", root / f"runtime/pass_runtime/{NAME}"
        self.folder.mkdir(parents=True)
        self.library.parent.mkdir()
        shutil.copy(BUILD, self.folder)
        (self.folder / "answer.cpp").write_text(SOURCE)
        self.define(1)

    def define(self, answer: object) -> None:
        (self.folder / "answer.h").write_text(f"#define ANSWER {answer}\n")

    def start(self, *flags: str, **changed: str) -> subprocess.Popen[str]:
        command = [sys.executable, self.folder / "build.py", *flags]
        return subprocess.Popen(
            command, env=environment(changed), stderr=subprocess.PIPE, text=True
        )

    def build(self, *flags: str, expected: int = 0, **changed: str) -> str:
        """Run build.py. Return what it says, which is nothing if the library is up to date."""
        done = self.start(*flags, **changed)
        errors = done.communicate()[1]
        assert done.returncode == expected, errors
        return errors


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    return Kernels(tmp_path)


@needs_compiler
def test_the_library_is_built_again_only_if_something_has_changed(kernels: Kernels, tmp_path: Path):
    assert f"building {NAME}" in kernels.build() and CDLL(str(kernels.library)).answer() == 1
    assert kernels.build() == ""
    kernels.define(2)
    assert "building" in kernels.build()
    assert (
        "building" in kernels.build(CXXFLAGS="-DOTHER") and kernels.build(CXXFLAGS="-DOTHER") == ""
    )
    other = tmp_path / "other.so"
    assert "building" in kernels.build("--output", str(other))
    assert CDLL(str(other)).answer() == 2
    assert "building" in kernels.build("--sanitize", "undefined")
    assert [*kernels.library.parent.iterdir()] == [kernels.library]


@needs_compiler
def test_sources_that_do_not_compile_leave_the_old_library(kernels: Kernels):
    kernels.build()
    kernels.define("nonsense")
    said = kernels.build(expected=1)
    assert "error: this failed: " in said and "answer.cpp" in said and "nonsense" in said
    assert [*kernels.library.parent.iterdir()] == [kernels.library]
    assert CDLL(str(kernels.library)).answer() == 1


def test_without_a_compiler_one_line_says_what_to_do(kernels: Kernels):
    said = "error: there is no %s; install g++, or name a compiler: CXX=...\n"
    assert kernels.build(expected=2, **NO_COMPILER) == said % "C++ compiler"
    assert kernels.build(expected=2, CXX="missing --flag") == said % "missing"
    assert not kernels.library.exists()


@needs_compiler
def test_two_may_build_at_once(kernels: Kernels):
    started = [kernels.start() for _ in range(2)]
    assert [process.communicate() and process.returncode for process in started] == [0, 0]
    assert [*kernels.library.parent.iterdir()] == [kernels.library]
    assert CDLL(str(kernels.library)).answer() == 1 and kernels.build() == ""


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_instruction_sets_are_those_of_the_compilers_machine(kernels, machine, tmp_path):
    for name in ("avx2", "avxvnni", "avx512"):
        (kernels.folder / f"{name}.cpp").write_text("")
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    text = RECORDER.replace("MACHINE", machine).replace("CALLS", str(calls))
    compiler.write_text(text)
    compiler.chmod(0o755)
    kernels.build(CXX=f"{compiler} --first", CXXFLAGS="--last")
    *compiled, linked = sorted(calls.read_text().splitlines(), key=lambda call: "-shared" in call)
    sources = {call.split(" -c ")[1].split()[0]: call.split() for call in compiled}
    is_x86 = machine == "x86_64"
    assert sorted(sources) == [
        "answer.cpp",
        *["avx2.cpp", "avx512.cpp", "avxvnni.cpp"][: 3 * is_x86],
    ]
    for words in [*sources.values(), linked.split()]:
        assert words[0] == "--first" and "--last" in words
        assert ("-DPASS_X86" in words) == is_x86 and "-ffp-contract=off" in words
    assert ("-mavxvnni" in sources.get("avxvnni.cpp", [])) == is_x86
    assert not [word for word in sources["answer.cpp"] if word.startswith("-m")]


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux")
@pytest.mark.parametrize(
    ("needed", "expected"),
    [
        ("GLIBC_2.2.5 GLIBCXX_3.4 CXXABI_1.3.9", "manylinux_2_28"),
        ("GLIBC_2.2.5 GLIBC_2.35", "manylinux_2_35"),
        ("GLIBC_2.2.5 GLIBCXX_3.4.30", "linux"),
        ("GLIBC_2.2.5 CXXABI_1.3.13", "linux"),
        ("GLIBC_2.2.5 libc++.so.1", "linux"),
        ("", "linux"),
    ],
)
def test_a_wheel_is_for_the_systems_that_have_its_symbols(needed, expected, tmp_path):
    spec = importlib.util.spec_from_file_location("kernels_build", BUILD)
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    (tmp_path / NAME).write_text(needed)
    assert build.platform_tag(tmp_path / NAME) == f"{expected}_{platform.machine()}"


@pytest.fixture(scope="module")
def hatchling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    (requirement,) = project["build-system"]["requires"]
    directory = tmp_path_factory.mktemp("hatchling")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", directory, requirement], check=True)
    return directory


class Project(Kernels):
    """A copy of the repository, with small sources and models, and without .gitignore."""

    def __init__(self, root: Path, hatchling: Path) -> None:
        super().__init__(root)
        self.root, self.hatchling = root, hatchling
        ignored = shutil.ignore_patterns("__pycache__", NAME)
        for name in ("exporter", "runtime/pass_runtime", "runtime/pass_server"):
            shutil.copytree(ROOT / name, root / name, ignore=ignored, dirs_exist_ok=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, root)
        (root / "models").mkdir()
        (root / "models/registry.toml").touch()

    def make(self, call: str, **changed: str) -> tuple[Path, str]:
        done = subprocess.run(
            [sys.executable, "-c", f"from hatchling.build import *; print({call}('dist'))"],
            cwd=self.root,
            env=environment({"PYTHONPATH": str(self.hatchling)} | changed),
            capture_output=True,
            text=True,
            check=True,
        )
        return self.root / "dist" / done.stdout.splitlines()[-1], done.stdout + done.stderr


@pytest.fixture
def project(tmp_path: Path, hatchling: Path) -> Project:
    return Project(tmp_path, hatchling)


def files(wheel: Path) -> list[str]:
    return [name for name in zipfile.ZipFile(wheel).namelist() if NAME in name]


@needs_compiler
@pytest.mark.slow
def test_a_wheel_has_the_library_and_its_platform(project: Project):
    wheel, _ = project.make("build_wheel")
    assert files(wheel) == [f"pass_runtime/{NAME}"]
    _, _, *tags = wheel.stem.split("-")
    assert tags[:2] == ["py3", "none"] and tags[2].endswith(f"_{platform.machine()}")


@pytest.mark.slow
@pytest.mark.parametrize("broken", [NO_COMPILER, {"PASS_KERNELS": "off"}, {"CXXFLAGS": "nonsense"}])
def test_a_wheel_without_the_library_is_pure_and_runs(project, broken, tmp_path):
    """A library that was built before does not get into it."""
    project.library.write_text("of other sources")
    wheel, said = project.make("build_wheel", **broken)
    assert wheel.stem.endswith("py3-none-any") and files(wheel) == []
    assert ("warning: the package is made without CPU kernels" in said) == (
        "off" not in str(broken)
    )
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    done = subprocess.run(
        [sys.executable, "-m", "pass_runtime", "--version"],
        env=environment({"PYTHONPATH": str(installed)}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout


@needs_compiler
@pytest.mark.slow
def test_an_editable_installation_uses_the_library_where_it_is(project: Project):
    wheel, _ = project.make("build_editable")
    assert wheel.stem.endswith("py3-none-any") and files(wheel) == []
    assert CDLL(str(project.library)).answer() == 1


@pytest.mark.slow
def test_a_source_distribution_has_the_sources_alone(project: Project):
    project.library.write_text("built before")
    archive, _ = project.make("build_sdist")
    with tarfile.open(archive) as opened:
        names = opened.getnames()
    kernels = {Path(name).name for name in names if "/runtime/kernels/" in name}
    assert kernels == {"answer.cpp", "answer.h", "build.py"}
    assert not [name for name in names if name.endswith(NAME)]
