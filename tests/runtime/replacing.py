"""Ways in which a bundle changes while it is open."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from pass_exporter.staging import staged_directory


def export_again(bundle: Path, other: Path) -> None:
    with staged_directory(bundle, force=True) as directory:
        shutil.copytree(other, directory, dirs_exist_ok=True)


def switch_link(bundle: Path, other: Path) -> None:
    first, link = bundle.resolve(), bundle.with_name("link")
    link.symlink_to(other)
    link.replace(bundle)
    shutil.rmtree(first)


def rename_over(bundle: Path, other: Path) -> None:
    """As `rsync --delete` does."""
    for path in bundle.iterdir():
        if not (other / path.name).exists():
            path.unlink()
    for path in other.iterdir():
        shutil.copy(path, bundle / ".part")
        (bundle / ".part").replace(bundle / path.name)


def remove(bundle: Path, _: Path) -> None:
    shutil.rmtree(bundle.resolve())


REPLACEMENTS: dict[str, Callable[[Path, Path], None]] = {
    "exported again": export_again,
    "another link": switch_link,
    "rsync": rename_over,
    "removed": remove,
}
"""Ways after which an open session goes on with what it opened."""


def copy_bundle(bundle: Path, directory: Path) -> Path:
    shutil.copytree(bundle, directory / "first")
    (directory / "bundle").symlink_to("first")
    return directory / "bundle"


def write_into(path: Path) -> None:
    """As `rsync --inplace` and `cp` do."""
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))
