"""`find_kernels` finds how the CPU's kernels round, and the backend chooses graphs, paddings and
caches by the result. Tests pretend other results; tests/cpus emulates CPUs that have them."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from manifests import linked, replace

from pass_runtime import GenerateOptions, PassError, SamplingParams, load
from pass_runtime.backends.ort import backend as ort_backend
from pass_runtime.backends.ort import kernels, trunks
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.kernels import (
    EXACT,
    INT32,
    UINT8,
    Kernels,
    _open,
    _run,
    block_formats,
    find_kernels,
)
from pass_runtime.backends.ort.packing import sample_logits
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.bundle.read import read_manifest

PADDED = Kernels(exact_sums=True, least_rows=2, equal_softmax=True)
DIFFERING = Kernels(exact_sums=True, least_rows=None, equal_softmax=True)
UNEQUAL = Kernels(exact_sums=True, least_rows=1, equal_softmax=False)
SATURATING = Kernels(exact_sums=False, least_rows=1, equal_softmax=True)
PROMPT = np.random.default_rng(0).integers(4, 200, 40).tolist()


def pretend(patch: pytest.MonkeyPatch, found: Kernels) -> None:
    """Let backends that are opened from now on find these kernels."""
    for module in (ort_backend, trunks):
        patch.setattr(module, "find_kernels", lambda _manifest: found)


def open_backend(bundle: Path, slots: int = 1) -> OrtBackend:
    return OrtBackend(bundle, read_manifest(bundle), "cpu", threads=1, max_batch_size=slots)


def test_the_graph_of_a_probe_computes_the_product(monkeypatch):
    random = np.random.default_rng(0)
    rows = random.integers(0, 100, (3, 64), np.uint8)
    weights = random.integers(-100, 100, (64, 16), np.int8)
    session = _open("MatMulInteger", "", {}, (UINT8, 64), INT32, weights=weights)
    # With these numbers no sum saturates, on any CPU.
    assert np.array_equal(_run(session, rows), rows.astype(np.int64) @ weights)


@pytest.mark.parametrize(
    ("sums", "rows"), [(True, {4: 1, 8: 1}), (False, {4: 2, 8: 1}), (True, {4: 1, 8: None})]
)
def test_the_rows_of_a_bundle_are_the_most_that_one_of_its_formats_needs(
    tiny_bundle: Path,
    monkeypatch,
    sums: bool,
    rows: dict[int, int | None],
):
    monkeypatch.setattr(kernels, "sums_are_exact", lambda: sums)
    monkeypatch.setattr(kernels, "least_rows", lambda bits, _block_size: rows[bits])
    monkeypatch.setattr(kernels, "softmax_is_equal", lambda: True)
    assert find_kernels(read_manifest(tiny_bundle)) == Kernels(sums, 1, True)  # it has no blocks
    monkeypatch.setattr(kernels, "block_formats", lambda _manifest: {(4, 32), (8, 32)})
    least = None if None in rows.values() else max(rows.values())
    assert find_kernels(read_manifest(tiny_bundle)) == Kernels(sums, least, True)


def test_older_bundles_in_int4_have_blocks_of_32(tiny_bundle: Path):
    manifest = read_manifest(tiny_bundle)
    assert not block_formats(manifest)
    model = manifest.model.model_copy(update={"weights": "int4"})
    assert set(block_formats(manifest.model_copy(update={"model": model}))) == {(4, 32), (8, 32)}


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_padded_rows_change_nothing(adapter_bundle: Path, monkeypatch, slots: int):
    """Neither the texts nor the capacity; only one slot needs padding, as a batch has two rows."""

    def texts_and_capacity() -> list[object]:
        with load(adapter_bundle, "cpu", threads=1, max_batch_size=slots, capacity=64) as session:
            texts = []
            for plan in ("ar", "two-pass", "fused"):
                sampling = SamplingParams(0.8, seed=3)
                options = GenerateOptions(24, sampling, plan=plan, ignore_eos=True)
                texts.append(session.generate_ids(PROMPT, options).result().token_ids)
            return [texts, session.backend.capabilities.max_capacity]

    without_padding = texts_and_capacity()
    pretend(monkeypatch, PADDED)
    assert texts_and_capacity() == without_padding
    backend = open_backend(adapter_bundle, slots)
    assert backend.capabilities.least_rows == 2 and backend.capabilities.same_entries
    widths = {batch: backend.capabilities.trunk_width(1, batch) for batch in (1, 2, 3)}
    assert widths == {1: 2, 2: 1, 3: 1}
    backend.close()


def test_without_equal_numbers_of_rows_the_prefix_cache_is_off(
    tiny_bundle: Path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    pretend(monkeypatch, DIFFERING)
    options = GenerateOptions(4, plan="ar", ignore_eos=True)
    with load(tiny_bundle, "cpu", threads=1) as session:
        assert not session.backend.capabilities.same_entries
        for _ in range(2):
            assert session.generate_ids(PROMPT, options).result().stats.cached_tokens == 0
    assert "numbers of rows never equal" in caplog.text and "the prefix cache is off" in caplog.text


def test_a_softmax_that_masked_entries_change_needs_the_trunk_for_batches(
    tiny_bundle: Path, monkeypatch
):
    """With one slot, too: the softmax of this trunk is over a multiple of 64 entries."""
    opened: list[str] = []
    open_session = trunks.open_session

    def record(path: Path, *arguments, **options):
        opened.append(path.name)
        return open_session(path, *arguments, **options)

    monkeypatch.setattr(trunks, "open_session", record)
    for result in (EXACT, UNEQUAL):
        pretend(monkeypatch, result)
        open_backend(tiny_bundle).close()
    assert opened == ["trunk.cpu.one.onnx", "trunk.cpu.onnx"]


def test_weights_become_unsigned_where_sums_saturate(
    rounding_bundle: Path, tmp_path: Path, monkeypatch
):
    """ONNX Runtime then computes the same. A bundle whose graphs have no zero points of weights,
    which this needs, is refused."""
    manifest = read_manifest(rounding_bundle)
    assert all(each.weight_zero_points for each in manifest.derived)
    unsigned_options: list[bool] = []
    open_session = trunks.open_session

    def logits() -> list[np.ndarray]:
        with closing(open_backend(rounding_bundle)) as backend:
            return sample_logits(backend)

    def record(*arguments, unsigned: bool, **others):
        unsigned_options.append(unsigned)
        return open_session(*arguments, unsigned=unsigned, **others)

    monkeypatch.setattr(trunks, "open_session", record)
    pretend(monkeypatch, EXACT)
    exact = logits()
    pretend(monkeypatch, SATURATING)
    assert all(map(np.array_equal, exact, logits()))
    assert unsigned_options == [False, True]
    without = {"weight_zero_points": False}
    derived = tuple(each.model_copy(update=without) for each in manifest.derived)
    document = manifest.model_copy(update={"derived": derived}).model_dump_json()
    old = linked(rounding_bundle, tmp_path)
    replace(old / FILE_NAME, document.encode())
    with pytest.raises(PassError) as refused:
        load(old, "cpu", threads=1)
    assert str(refused.value) == (
        f"{old}: its 8-bit sums saturate on this CPU: export it again, or export it as int8"
    )
    pretend(monkeypatch, EXACT)
    load(old, "cpu", threads=1).close()


def test_str_describes_the_kernels():
    assert str(EXACT) == (
        "8-bit sums exact, numbers of rows equal from 1 on, softmax with masked entries equal"
    )
    assert str(Kernels(False, None, False)) == (
        "8-bit sums saturating, numbers of rows never equal, softmax with masked entries not equal"
    )
