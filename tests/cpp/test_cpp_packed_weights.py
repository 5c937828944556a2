"""The C++ runtime maps packed weights into memory that the Python runtime has stored in its cache,
on the same conditions as the Python runtime."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cpp_programs import generate

from conftest import export_bundle
from once import made_once
from pass_runtime import GenerateOptions, load
from pass_runtime.backends.ort import packed_weights
from pass_runtime.backends.ort.kernels import Kernels
from pass_runtime.backends.ort.packed_weights import NOTE_FILE, WeightCache
from pass_runtime.backends.ort.packing import GRAPH_FILE, WEIGHTS_FILE
from pass_runtime.bundle import integrity
from pass_runtime.bundle.read import read_manifest

LONG_AGO = 1e9
"""The time that entries get as their last use. An entry that is mapped gets the present time."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PASS_CACHE", str(tmp_path))
    # The files of tests are new and small, for which nothing is cached by default.
    monkeypatch.setattr(integrity, "MIN_AGE_NS", 0)
    monkeypatch.setattr(WeightCache.__init__, "__defaults__", (None, 0, 16 << 30))
    return tmp_path / "packed"


@pytest.fixture(scope="module", params=["full", "int4", "w8a8", "adapter"])
def bundle(
    request: pytest.FixtureRequest, tiny_model: Path, adapter_weights: Path, shared: Path
) -> Path:
    options = {"lookahead": 4, "weights": request.param}
    if request.param == "adapter":
        options = {"lookahead": 3, "lookahead_weights": adapter_weights}
    return made_once(
        shared / f"packed-cpp-{request.param}", lambda at: export_bundle(tiny_model, at, **options)
    )


def entries_of(bundle: Path, cache: Path) -> list[Path]:
    """Return the entries of the cache that Python makes, last used LONG_AGO."""
    for _ in range(2):  # the first session caches the hashes, without which no entry is made
        load(bundle, "cpu", threads=1).close()
    entries = list(cache.iterdir())
    for entry in entries:
        os.utime(entry, (LONG_AGO, LONG_AGO))
    return entries


def tokens(bundle: Path, *flags: str) -> list[int]:
    done = generate(bundle, 24, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["token_ids"]


@pytest.mark.parametrize("flags", [(), ("--no-weight-cache",)])
def test_weights_that_python_packed_are_mapped(bundle: Path, cache: Path, flags: tuple[str, ...]):
    entries = entries_of(bundle, cache)
    # With an adapter there are two trunks: one of them runs no look-ahead rows.
    assert len(entries) == 1 + bool(read_manifest(bundle).lookahead.adapter_rank)
    options = GenerateOptions(24, plan="fused", ignore_eos=True)
    with load(bundle, "cpu", threads=1, weight_cache=False) as session:
        expected = session.generate_ids([5, 6, 7], options).result().token_ids
    assert tokens(bundle, *flags) == expected
    unused = {entry.stat().st_mtime == LONG_AGO for entry in entries}
    assert unused == {bool(flags)}


def test_weights_that_were_packed_for_other_kernels_are_not_used(
    tiny_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        packed_weights, "find_kernels", lambda _manifest: Kernels(False, None, False)
    )
    [entry] = entries_of(tiny_bundle, cache)
    tokens(tiny_bundle)
    assert entry.stat().st_mtime == LONG_AGO


def flip(path: Path) -> None:
    content = np.fromfile(path, np.uint8)
    content[len(content) // 2] ^= 0xFF
    content.tofile(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no note": lambda entry: (entry / NOTE_FILE).unlink(),
    "half a note": lambda entry: os.truncate(entry / NOTE_FILE, 40),
    "another note": lambda entry: (entry / NOTE_FILE).write_text('{"files": [1]}'),
    "unusable": lambda entry: (entry / NOTE_FILE).write_text('{"unusable": "it is not"}'),
    "no graph": lambda entry: (entry / GRAPH_FILE).unlink(),
    "short weights": lambda entry: os.truncate(entry / WEIGHTS_FILE, 4096),
    "other weights": lambda entry: flip(entry / WEIGHTS_FILE),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_not_used(tiny_bundle: Path, cache: Path, damage: str):
    expected = tokens(tiny_bundle, "--no-weight-cache")
    [entry] = entries_of(tiny_bundle, cache)
    DAMAGES[damage](entry)
    os.utime(entry, (LONG_AGO, LONG_AGO))
    assert tokens(tiny_bundle) == expected
    assert entry.stat().st_mtime == LONG_AGO


def test_without_cached_hashes_no_entry_is_used(tiny_bundle: Path, cache: Path):
    [entry] = entries_of(tiny_bundle, cache)
    (cache.parent / "hashes.txt").unlink()
    tokens(tiny_bundle, "--trust-bundle")
    assert entry.stat().st_mtime == LONG_AGO
