"""Bundles whose files are links, as git-annex and DVC make them."""

from __future__ import annotations

import shutil
from pathlib import Path

KINDS = {
    "all": lambda _: True,
    "weights": lambda name: name.endswith(".data"),
    "graphs": lambda n: n.endswith(".onnx"),
}
"""Which files are links, by name."""


def bundle_of_links(bundle: Path, directory: Path, kind: str, absolute: bool) -> Path:
    """A copy of a bundle in which some files are links to links."""
    found = directory / "bundle"
    found.mkdir()
    for i, path in enumerate(sorted(bundle.iterdir())):
        if path.is_dir() or not KINDS[kind](path.name):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, found / path.name)
            continue
        folder = directory / f"{i}"
        folder.mkdir()
        shutil.copy(path, folder / "content")
        (folder / "link").symlink_to("content")
        link = Path(f"../{i}/link")
        (found / path.name).symlink_to(folder / "link" if absolute else link)
    return found
