"""Files hashed once are not read again while unchanged; a change is noticed at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from manifests import linked, refusal, replace

from pass_runtime.bundle import integrity
from pass_runtime.bundle.integrity import HASHES_FILE, HashCache, file_info, verify_files
from pass_runtime.bundle.read import read_manifest
from pass_runtime.session import load

NAME = "tail.ar.greedy.onnx"


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(integrity, "MIN_AGE_NS", 0)  # the files of tests are young
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which every file that is hashed appends its name."""
    names: list[str] = []

    def noted(path, *rest):
        names.append(path.name)
        return file_info(path, *rest)

    monkeypatch.setattr(integrity, "file_info", noted)
    return names


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return linked(tiny_bundle, tmp_path)


def test_a_bundle_is_read_once(bundle: Path, reads: list[str], cache_of_its_own: Path):
    files = sorted(read_manifest(bundle).files)
    load(bundle, "cpu").close()
    assert sorted(reads) == files
    load(bundle, "cpu").close()
    load(bundle, "cpu", verify=False).close()
    assert sorted(reads) == files
    assert [path.name for path in cache_of_its_own.iterdir()] == [HASHES_FILE]
    verify_files(bundle, read_manifest(bundle))  # as `pass-run inspect --verify`: all of it, always
    assert sorted(reads) == sorted([*files, *files])


@pytest.mark.parametrize("how", ["in place", "replaced", "times set back"])
def test_a_changed_file_is_found_at_the_next_load(bundle: Path, reads: list[str], how: str):
    path = bundle / NAME
    replace(path, path.read_bytes())  # no link any more
    load(bundle, "cpu").close()
    status, content = path.stat(), bytearray(path.read_bytes())
    content[100] ^= 1
    time.sleep(0.05)  # longer than a tick of the file system's clock
    if how == "replaced":
        replace(path, bytes(content))
    else:
        with path.open("r+b") as file:
            file.write(content)
    if how == "times set back":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    del reads[:]
    assert f"{path} does not match its SHA-256" in refusal(load, bundle, "cpu")
    assert reads == [NAME]


def test_a_file_that_changed_just_now_is_not_remembered(
    bundle: Path, reads: list[str], monkeypatch
):
    monkeypatch.setattr(integrity, "MIN_AGE_NS", 10**18)
    load(bundle, "cpu").close()
    load(bundle, "cpu").close()
    assert reads.count(NAME) == 2


@pytest.mark.parametrize("what", ["a file", "bytes", "words", "another hash", "a directory"])
def test_an_unusable_cache_of_hashes_is_ignored(bundle: Path, cache_of_its_own: Path, what: str):
    file = cache_of_its_own / HASHES_FILE
    if what == "a file":
        cache_of_its_own.write_text("")
    else:
        cache_of_its_own.mkdir()
    if what == "bytes":
        file.write_bytes(b"\xff\xfe\x00 1\n")
    elif what == "words":
        file.write_text("no such line\n\n 1 2 3\n")
    elif what == "another hash":
        load(bundle, "cpu").close()
        lines = file.read_text().splitlines()
        file.write_text("".join(f"{line[:-64]}{'0' * 64}\n" for line in lines))
    elif what == "a directory":
        file.mkdir()
    load(bundle, "cpu").close()
    replace(bundle / NAME, b"x" * (bundle / NAME).stat().st_size)
    assert NAME in refusal(load, bundle, "cpu")


def test_the_newest_hashes_are_kept_and_those_of_other_processes_too(
    tmp_path: Path, cache_of_its_own: Path, monkeypatch
):
    monkeypatch.setattr(integrity, "MAX_CACHED_HASHES", 3)
    first, second = HashCache(), HashCache()
    for number, one in enumerate((first, first, second, second)):
        (path := tmp_path / f"file-{number}").write_text(str(number))
        assert one.matches(path, f"hash-{number}", lambda _, number=number: f"hash-{number}")
    first.save()
    second.save()
    lines = (cache_of_its_own / HASHES_FILE).read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["hash-1", "hash-2", "hash-3"]
