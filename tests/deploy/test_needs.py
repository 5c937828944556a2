"""What a command lacks of the extras is named when it starts, and with them it ends well."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import distribution, requires
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from running import Server

import pass_exporter.cli
import pass_runtime.cli.main
import pass_trainer.cli
from pass_runtime.packages import MODULES, PROJECT, missing

PROGRAMS: dict[str, tuple[str, click.Group]] = {
    "pass-run": ("pass_runtime", pass_runtime.cli.main.main),
    "pass-export": ("pass_exporter", pass_exporter.cli.main),
    "pass-train": ("pass_trainer", pass_trainer.cli.main),
}
"""The module that `python -m` runs, and the group of commands."""
EXPORT = ("--model", "MODEL", "--lookahead", "2", "-o", "OUT")
TRAIN = (
    *("--model", "MODEL", "--data", "TEXT", "-o", "OUT", "--lookahead", "2", "--steps", "2"),
    *("--sequences", "64", "--sequence-length", "24", "--prompt-tokens", "4", "8"),
    *("--dtype", "fp32", "--device", "cpu"),
)
EVALUATE = ("evaluate", "--model", "MODEL", "--each", "1", "--kinds", "chat", "--tokens", "8")
ENGINE = ("--engine", "tensorrt-rtx", "--compute-capability", "8.9", "--max-seq-len", "64")
BUILD = ("build", "BUNDLE", *ENGINE)
EXPORT_AND_BUILD = ("pass-export", *EXPORT, *ENGINE)
COMMANDS: dict[tuple[str, ...], Sequence[str]] = {
    ("pass-run", "generate", "BUNDLE", "-p", "a", "--max-new-tokens", "2"): ["cpu"],
    ("pass-run", "chat", "BUNDLE", "--max-new-tokens", "2"): ["cpu"],
    ("pass-run", "batch", "BUNDLE", "REQUESTS", "OUT", "--max-new-tokens", "2"): ["cpu"],
    ("pass-run", "bench", "BUNDLE", "-p", "a", "--repeat", "1", "--max-new-tokens", "4"): ["cpu"],
    ("pass-run", "inspect", "BUNDLE"): ["cpu"],
    ("pass-run", "serve", "BUNDLE", "--port", "0"): ["cpu", "serve"],
    ("pass-export", *EXPORT): ["cpu", "export"],
    EXPORT_AND_BUILD: ["cpu", "export", "tensorrt-rtx"],
    ("pass-export", *BUILD): ["tensorrt-rtx"],
    ("pass-export", *BUILD, "--verify"): ["cpu", "tensorrt-rtx"],
    ("pass-export", "triton", "BUNDLE", "-o", "OUT"): [],
    ("pass-train", *TRAIN): ["cpu", "train"],
    ("pass-train", *EVALUATE): ["cpu", "export"],
}
"""By command with its arguments, the extras that it needs."""
WITHOUT_NAME = {"pass-export", "pass-train"}
"""The groups that are commands themselves."""


def packages_of(extra: str) -> list[str]:
    found = map(Requirement, requires(PROJECT) or ())
    return [each.name for each in found if f'extra == "{extra}"' in str(each.marker)]


MISSING = [
    pytest.param(command, extra, package, id=f"{' '.join(command[:2])}-{extra}-{package}")
    for command, extras in COMMANDS.items()
    for extra in extras
    for package in packages_of(extra)
]


def test_the_table_has_every_command():
    tested = {command[:2] for command in COMMANDS}
    for name, (_, main) in PROGRAMS.items():
        commands = main.list_commands(click.Context(main))
        assert {(name, each) for each in commands} <= tested, name
    assert {name for name, second, *_ in COMMANDS if second.startswith("--")} == WITHOUT_NAME
    assert {extra for extras in COMMANDS.values() for extra in extras} >= {"cpu", "train", "serve"}


@pytest.fixture
def places(tiny_bundle: Path, tiny_model: Path, tmp_path: Path) -> dict[str, str]:
    text, requests = tmp_path / "text.txt", tmp_path / "requests.jsonl"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    requests.write_text('{"prompt": "a"}\n')
    named = {"BUNDLE": tiny_bundle, "MODEL": tiny_model, "OUT": tmp_path / "out"}
    return {key: str(value) for key, value in {**named, "TEXT": text, "REQUESTS": requests}.items()}


@pytest.mark.parametrize(("command", "extra", "package"), MISSING)
def test_a_missing_package_is_named_at_the_start(command, extra, package, places, monkeypatch):
    if missing("tensorrt-rtx") and "tensorrt-rtx" in COMMANDS[command]:
        pytest.skip("the extra tensorrt-rtx is not installed")
    monkeypatch.setitem(sys.modules, MODULES.get(package, package.replace("-", "_")), None)
    name, *arguments = command
    done = CliRunner().invoke(PROGRAMS[name][1], [places.get(each, each) for each in arguments])
    assert done.exit_code == 2 and done.stdout == ""
    said, _, advice = done.stderr.rstrip("\n").partition("; run: ")
    assert said == f"error: {package} is not installed", done.stderr
    extras = [each for each in COMMANDS[command] if package in packages_of(each)]
    assert extra in extras and advice.startswith("pip install 'pass-toolkit[")
    assert any(each in advice for each in extras)
    assert "\n" not in advice and ("gpu" in advice) == (extra == "cpu")
    assert not Path(places["OUT"]).exists()


def closure(extras: Iterable[str]) -> set[str]:
    found: set[tuple[str, str]] = set()
    todo = [(PROJECT, extra) for extra in ("", *extras)]
    while todo:
        name, extra = each = todo.pop()
        if each in found:
            continue
        found.add(each)
        for requirement in map(Requirement, requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                package = canonicalize_name(requirement.name)
                todo += [(package, of) for of in ("", *requirement.extras)]
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make an environment as `pip install 'pass-toolkit[...]'` does, of links, and return its
    python."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*extras: str) -> Path:
        if extras not in made:
            root = tmp_path_factory.mktemp("environment")
            venv.create(root, symlinks=True)
            (site,) = root.glob("lib/python*/site-packages")
            for name in closure(extras):
                files = distribution(name).files or ()
                for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
                    if not (site / top).exists():
                        (site / top).symlink_to(distribution(name).locate_file(top))
            made[extras] = root / "bin/python"
        return made[extras]

    return make


def run(python: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    name, *arguments = command
    return subprocess.run(
        [python, "-m", PROGRAMS[name][0], *arguments],
        input="",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.seldom] if command is EXPORT_AND_BUILD else [])
        for command in COMMANDS
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_command_ends_well_with_its_extras_and_in_one_line_without(
    command, places, environment, tmp_path
):
    if "build" in command:  # it writes into the bundle, which other tests read
        places["BUNDLE"] = str(shutil.copytree(places["BUNDLE"], tmp_path / "bundle"))
    extras, line = COMMANDS[command], [places.get(each, each) for each in command]
    if extras:
        bare = run(environment(), line)
        assert (bare.returncode, bare.stdout) == (2, "") and bare.stderr.count("\n") == 1
        assert bare.stderr.startswith("error: ") and "not installed; run: pip" in bare.stderr
    if "tensorrt-rtx" in extras and (missing("tensorrt-rtx") or "--verify" in command):
        pytest.skip("it needs TensorRT-RTX, or a GPU")
    python = environment(*extras)
    if "serve" in command:
        with Server(
            Path(places["BUNDLE"]), tmp_path / "log", command=[python, "-m", "pass_runtime"]
        ) as server:
            assert server.complete(max_tokens=2).status_code == 200
        return
    done = run(python, line)
    assert done.returncode == 0, done.stderr
