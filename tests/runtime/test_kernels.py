from __future__ import annotations

import _ctypes
import shutil
from pathlib import Path

import psutil
import pytest
from manifests import linked, real_document, refusal, write_manifest

from pass_runtime import GenerateOptions, Session, load
from pass_runtime.backends.ort.session import (
    LIBRARY,
    find_kernels,
    kernels_name,
    library,
    open_trunk,
)
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.read import read_manifest

VARIANTS = ("avx512-vnni", "avx-vnni", "avx2", "plain")
MACHINE = slice(18, 20)
"""The bytes of an ELF file that say for which kind of CPU it is."""
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="the kernels are not built")


def decoded(session: Session) -> list[int]:
    return session.generate("The", GenerateOptions(16, ignore_eos=True)).result().token_ids


@needs_library
def test_the_library_beside_the_package_is_found():
    assert library() == LIBRARY and kernels_name() in VARIANTS


@needs_library
def test_another_library_can_be_named(monkeypatch, tmp_path: Path):
    copy = shutil.copy(LIBRARY, tmp_path / "copy.so")
    monkeypatch.setenv("PASS_KERNELS", str(copy))
    assert library() == copy


def damaged(path: Path, kind: str) -> Path:
    """Write a file that is no library of kernels for this machine."""
    other = Path(_ctypes.__file__).read_bytes()
    content = LIBRARY.read_bytes() if LIBRARY.exists() else other
    damages = {
        "cut off": content[: len(content) * 2 // 3],
        "for another CPU": content[: MACHINE.start] + b"\xf7\x01" + content[MACHINE.stop :],
        "text": b"not a library",
        "empty": b"",
        "another library": other,
    }
    path.write_bytes(damages[kind])
    return path


@pytest.mark.parametrize("kind", ["cut off", "for another CPU", "text", "empty", "another library"])
def test_a_file_that_cannot_be_loaded_counts_as_missing(monkeypatch, tmp_path: Path, kind: str):
    monkeypatch.setenv("PASS_KERNELS", str(damaged(tmp_path / "broken.so", kind)))
    reason = find_kernels()
    assert isinstance(reason, str) and "broken.so" in reason and len(reason.splitlines()) == 1
    assert library() is None and kernels_name() is None


def test_a_missing_file_has_its_reason(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PASS_KERNELS", str(tmp_path / "none.so"))
    assert find_kernels() == f"there is no {tmp_path / 'none.so'}"
    monkeypatch.setenv("PASS_KERNELS", "off")
    assert find_kernels() == "PASS_KERNELS is off" and library() is None


@needs_library
def test_the_kernels_run_the_trunk_and_map_its_weights(tiny_bundle: Path, caplog):
    with load(tiny_bundle, "cpu", threads=1) as session:
        capabilities = session.backend.capabilities
        assert (capabilities.kernels, capabilities.same_entries) == (kernels_name(), True)
        assert session.backend._trunks.plain is session.backend._trunks.lookahead
        assert session.backend._trunks.plain.file == "trunk.cpu.onnx"
        if psutil.LINUX:
            regions = psutil.Process().memory_maps(grouped=False)
            assert str(tiny_bundle / "trunk.cpu.onnx.data") in {region.path for region in regions}
    assert not caplog.messages


def test_without_kernels_the_portable_trunk_runs(adapter_bundle: Path, monkeypatch, caplog):
    with load(adapter_bundle, "cpu", threads=1) as session:
        expected = decoded(session)
    caplog.clear()
    monkeypatch.setenv("PASS_KERNELS", "off")
    with load(adapter_bundle, "cpu", threads=1) as session:
        assert decoded(session) == expected
        capabilities = session.backend.capabilities
        assert (capabilities.kernels, capabilities.same_entries) == ("onnxruntime", False)
        assert session.backend._trunks.lookahead.file == "trunk.onnx"
    (line,) = caplog.messages
    assert "PASS_KERNELS is off" in line and "runtime/kernels/build.py" in line
    assert caplog.records[0].name == "pass_runtime.device"


@pytest.fixture
def cpu_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """`tiny_bundle` without its portable trunk, as of an export with --target cpu."""
    bundle, document = linked(tiny_bundle, tmp_path), real_document(tiny_bundle)
    (bundle / "trunk.onnx").unlink()
    del document["files"]["trunk.onnx"]
    write_manifest(bundle, document)
    return bundle


def test_a_bundle_for_the_cpu_alone_needs_the_kernels(cpu_bundle: Path, monkeypatch):
    monkeypatch.setenv("PASS_KERNELS", "off")
    message = refusal(load, cpu_bundle, "cpu")
    assert str(cpu_bundle) in message and "runtime/kernels/build.py" in message


def test_a_bundle_for_the_cpu_alone_runs_on_no_gpu(cpu_bundle: Path):
    manifest = read_manifest(cpu_bundle)
    files = OpenFiles.of_graphs(cpu_bundle, manifest)
    message = refusal(open_trunk, files, manifest, "cuda", 1, 1)
    assert str(cpu_bundle) in message and "--target any" in message


@needs_library
def test_a_bundle_for_the_cpu_alone_runs_there(cpu_bundle: Path, tiny_bundle: Path):
    texts = []
    for bundle in (cpu_bundle, tiny_bundle):
        with load(bundle, "cpu", threads=1) as session:
            texts.append(decoded(session))
    assert texts[0] == texts[1]
