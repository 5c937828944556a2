"""Bundles of symbolic links, as git-annex and DVC make them."""

from __future__ import annotations

import shutil
from pathlib import Path

KINDS = {
    "all": lambda _: True,
    "weights": lambda name: name.endswith(".data"),
    "graphs": lambda name: name.endswith(".onnx"),
}


def bundle_of_links(bundle: Path, directory: Path, kind: str, absolute: bool) -> Path:
    """Return a copy whose files of this kind are links to links to their content."""
    copy = directory / "bundle"
    copy.mkdir()
    for i, path in enumerate(sorted(bundle.iterdir())):
        if path.is_dir() or not KINDS[kind](path.name):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, copy / path.name)
            continue
        folder = directory / f"{i}"
        folder.mkdir()
        shutil.copy(path, folder / "content")
        (folder / "link").symlink_to("content")
        link = Path(f"../{i}/link")
        (copy / path.name).symlink_to(folder / "link" if absolute else link)
    return copy
