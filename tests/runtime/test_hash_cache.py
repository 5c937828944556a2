"""The cache of hashes: an unchanged file is hashed once; a changed one is hashed again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from manifests import linked, refusal, replace

from pass_runtime.bundle import integrity
from pass_runtime.bundle.integrity import HASHES_FILE, HashCache, file_info, verify_files
from pass_runtime.bundle.read import read_manifest
from pass_runtime.session import load

TAIL = "tail.ar.greedy.onnx"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(integrity, "MIN_AGE_NS", 0)  # the files of tests are young
    return tmp_path / "cache"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which every file that is hashed appends its name."""
    names: list[str] = []

    def recorded(path, *rest):
        names.append(path.name)
        return file_info(path, *rest)

    monkeypatch.setattr(integrity, "file_info", recorded)
    return names


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return linked(tiny_bundle, tmp_path)


def test_a_bundle_is_hashed_once(bundle: Path, hashed: list[str], cache: Path):
    files = sorted(read_manifest(bundle).files)
    load(bundle, "cpu").close()
    assert sorted(hashed) == files
    load(bundle, "cpu").close()
    load(bundle, "cpu", verify=False).close()
    assert sorted(hashed) == files
    assert [path.name for path in cache.iterdir()] == [HASHES_FILE]
    verify_files(bundle, read_manifest(bundle))  # as `pass-run inspect --verify`: without a cache
    assert sorted(hashed) == sorted([*files, *files])


@pytest.mark.parametrize("how", ["in place", "replaced", "times set back"])
def test_a_changed_file_is_refused_at_the_next_load(bundle: Path, hashed: list[str], how: str):
    path = bundle / TAIL
    replace(path, path.read_bytes())  # a copy of its own in place of the link
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
    del hashed[:]
    assert f"{path} does not match its SHA-256" in refusal(load, bundle, "cpu")
    assert hashed == [TAIL]


def test_the_hash_of_a_file_that_changed_just_now_is_not_cached(
    bundle: Path, hashed: list[str], monkeypatch
):
    monkeypatch.setattr(integrity, "MIN_AGE_NS", 10**18)
    load(bundle, "cpu").close()
    load(bundle, "cpu").close()
    assert hashed.count(TAIL) == 2


def write_wrong_hashes(file: Path) -> None:
    lines = file.read_text().splitlines()
    file.write_text("".join(f"{line[:-64]}{'0' * 64}\n" for line in lines))


FAULTS = {
    "no directory": lambda file: (shutil.rmtree(file.parent), file.parent.write_text("")),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00 1\n"),
    "other lines": lambda file: file.write_text("no such line\n\n 1 2 3\n"),
    "wrong hashes": write_wrong_hashes,
    "no file": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_unusable_cache_of_hashes_is_ignored(bundle: Path, cache: Path, fault: Callable):
    load(bundle, "cpu").close()
    fault(cache / HASHES_FILE)
    load(bundle, "cpu").close()
    replace(bundle / TAIL, b"x" * (bundle / TAIL).stat().st_size)
    assert TAIL in refusal(load, bundle, "cpu")


def test_the_newest_hashes_of_all_processes_are_kept(tmp_path: Path, cache: Path, monkeypatch):
    monkeypatch.setattr(integrity, "MAX_CACHED_HASHES", 3)
    first, second = HashCache(), HashCache()
    for number, hashes in enumerate((first, first, second, second)):
        (path := tmp_path / f"file-{number}").write_text(str(number))
        assert hashes.matches(path, f"hash-{number}", lambda _, number=number: f"hash-{number}")
    first.save()
    second.save()
    lines = (cache / HASHES_FILE).read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["hash-1", "hash-2", "hash-3"]
