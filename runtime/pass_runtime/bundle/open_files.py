"""The files that a session goes on using after it was opened."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError


class OpenFiles:
    """The present files of `folder`. graphs: the content of .onnx files. data: other files,
    mapped."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """Raises PassError if a file cannot be read."""
        self.folder = folder
        self.graphs: dict[str, bytes] = {}
        self.data: dict[str, mmap.mmap] = {}
        self._mapped: dict[str, tuple[int, tuple[int, int]]] = {}  # descriptor, size and time
        weakref.finalize(self, _close, self._mapped).atexit = False
        try:
            for name in names:
                if name.endswith(".onnx"):
                    self.graphs[name] = (folder / name).read_bytes()
                else:
                    self._map(name)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise PassError(f"cannot read the files in {folder}: {error}") from None

    @classmethod
    def of_graphs(cls, bundle: Path, manifest: Manifest) -> OpenFiles:
        """Open a bundle's graphs, where they exist, and all data."""
        graphs = {graph.file for graph in manifest.graphs}
        graphs |= {trunk.file for trunk in manifest.derived}
        paths = (path for path in bundle.iterdir() if path.name in graphs or path.suffix == ".data")
        return cls(bundle, (path.name for path in paths))

    def _map(self, name: str) -> None:
        descriptor = os.open(self.folder / name, os.O_RDONLY)
        status = os.fstat(descriptor)
        self._mapped[name] = descriptor, (status.st_size, status.st_mtime_ns)
        self.data[name] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)

    @property
    def failure(self) -> PassError | None:
        """A file was written: none can be used any more."""
        for name, (descriptor, before) in self._mapped.items():
            status = os.fstat(descriptor)
            # Not the ctime: renaming changes it too.
            if (status.st_size, status.st_mtime_ns) != before:
                return changed(f"{name} was written while the bundle was open")
        return None


def changed(how: str) -> PassError:
    return PassError(f"the bundle has changed ({how}): open it again")


def _close(mapped: Mapping[str, tuple[int, object]]) -> None:
    for descriptor, _ in mapped.values():
        os.close(descriptor)
