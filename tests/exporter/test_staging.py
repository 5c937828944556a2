"""`staged_directory`: a bundle appears whole or not at all, and a failure keeps the old bundle."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pass_exporter.staging import staged_directory
from pass_runtime import PassError


def make_bundle(path: Path, content: str = "old") -> Path:
    path.mkdir()
    (path / "pass_config.json").write_text(content)
    return path


def write(destination: Path, *, force: bool = False) -> None:
    with staged_directory(destination, force=force) as directory:
        (directory / "pass_config.json").write_text("new")


EXPORT = """
import os, sys
from pathlib import Path
from pass_exporter.staging import staged_directory

os.getpid = lambda: 1 << 30  # an export in another container has no entry in /proc either
with staged_directory(Path(sys.argv[1]), force=True) as directory:
    (directory / "pass_config.json").write_text("half")
    print("begun", flush=True)
    (directory / "pass_config.json").write_text(sys.stdin.read())
"""


@contextmanager
def export_elsewhere(destination: Path) -> Iterator[subprocess.Popen[str]]:
    """Write "half" in another process, and then the text on its standard input."""
    command = [sys.executable, "-c", EXPORT, str(destination)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "begun\n"
        yield running


def contents(path: Path) -> dict[str, str | None]:
    """Return the texts of all files below `path`, and None for empty directories."""
    found = {}
    for each in path.rglob("*"):
        if each.is_file() or not any(each.iterdir()):
            found[str(each.relative_to(path))] = each.read_text() if each.is_file() else None
    return found


def test_a_bundle_appears_when_it_is_complete(tmp_path: Path):
    destination = tmp_path / "a" / "b"
    with staged_directory(destination, force=False) as directory:
        (directory / "file").write_text("x")
        assert not destination.exists()
    assert contents(tmp_path) == {"a/b/file": "x"}


def test_an_existing_bundle_is_refused_before_any_work_and_replaced_with_force(tmp_path: Path):
    destination = make_bundle(tmp_path / "bundle")
    with pytest.raises(PassError, match="--force"), staged_directory(destination, force=False):
        pytest.fail("the work began")
    assert contents(tmp_path) == {"bundle/pass_config.json": "old"}
    (destination / "stale").write_text("x")
    write(destination, force=True)
    assert contents(tmp_path) == {"bundle/pass_config.json": "new"}


def test_force_replaces_an_empty_directory_that_a_link_leads_to(tmp_path: Path):
    bundle, link = tmp_path / "bundle", tmp_path / "link"
    bundle.mkdir()
    link.symlink_to("bundle")
    write(link, force=True)
    assert (bundle / "pass_config.json").read_text() == "new"
    assert link.is_symlink() and {*tmp_path.iterdir()} == {bundle, link}


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_force_replaces_only_bundles(tmp_path: Path, kind: str):
    destination = tmp_path / "thesis"
    if kind == "directory":
        destination.mkdir()
        (destination / "chapter1.tex").write_text("precious")
    else:
        destination.write_text("precious")
    with pytest.raises(PassError, match="is not a bundle"):
        write(destination, force=True)
    assert list(contents(tmp_path).values()) == ["precious"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, PassError])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_the_old_bundle_and_nothing_else(tmp_path, error, force):
    destination = tmp_path / "bundle"
    if force:
        make_bundle(destination)
    with pytest.raises(error), staged_directory(destination, force=force) as directory:
        (directory / "file").write_text("half")
        raise error
    assert contents(tmp_path) == ({"bundle/pass_config.json": "old"} if force else {})


def test_an_output_that_appeared_during_the_export_is_kept(tmp_path: Path):
    destination = tmp_path / "bundle"
    with pytest.raises(PassError, match="exists"), staged_directory(destination, force=False):
        make_bundle(destination, "by another program")
    assert contents(tmp_path) == {"bundle/pass_config.json": "by another program"}


@pytest.mark.parametrize("force", [False, True])
def test_a_second_export_to_the_same_path_is_refused_before_any_work(tmp_path: Path, force: bool):
    destination = tmp_path / "bundle"
    with export_elsewhere(destination) as running:
        error = r"another pass-export is writing .*bundle; wait for it, or use another --output"
        with pytest.raises(PassError, match=error), staged_directory(destination, force=force):
            pytest.fail("the work began")
        write(tmp_path / "other")  # another path is not locked
        running.communicate("whole")
    assert running.returncode == 0
    assert contents(tmp_path) == {
        "bundle/pass_config.json": "whole",
        "other/pass_config.json": "new",
    }


def test_the_next_export_removes_the_files_of_a_killed_one(tmp_path: Path):
    with export_elsewhere(tmp_path / "bundle") as running:
        running.kill()
    assert contents(tmp_path / ".bundle.partial")["pass_config.json"] == "half"
    write(tmp_path / "bundle")
    assert contents(tmp_path) == {"bundle/pass_config.json": "new"}


@pytest.mark.parametrize("name", ["bundle.partial", ".other.partial", ".bundle.partial-mine"])
def test_directories_of_similar_names_are_kept(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    write(tmp_path / "bundle")
    assert (tmp_path / name).is_dir()


def test_a_file_system_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(PassError, match=r"cannot write .*bundle: No locks available"):
        write(tmp_path / "bundle")


def test_the_next_export_moves_back_the_old_bundle_that_a_killed_one_had_moved_away(tmp_path: Path):
    make_bundle(tmp_path / ".bundle.replaced")
    with pytest.raises(RuntimeError), staged_directory(tmp_path / "bundle", force=True):
        raise RuntimeError
    assert contents(tmp_path) == {"bundle/pass_config.json": "old"}
    with pytest.raises(PassError, match="--force"):
        write(tmp_path / "bundle")


def test_a_path_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(PassError, match="cannot write"):
        write(tmp_path / "file" / "bundle")
