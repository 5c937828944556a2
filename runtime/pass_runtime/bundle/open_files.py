"""The files that a session goes on using after it was opened.

All are read or mapped when it is opened. So it goes on with them if the bundle's name leads to
another bundle later, as after `pass-export --force`, or to none. Whoever writes into a mapped file
changes what the session reads; `OpenFiles.failure` notices that.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError


class OpenFiles:
    """Files of the folder `folder` as they are when this is made.

    graphs: name -> the content of a file that ends in .onnx. data: name -> any other file, mapped,
    so that only what is used is read.
    """

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
        """Open the graphs of a bundle that there are, and all data."""
        graphs = {graph.file for graph in manifest.graphs}
        graphs |= {trunk.file for trunk in manifest.derived}
        paths = (path for path in bundle.iterdir() if path.name in graphs or path.suffix == ".data")
        return cls(bundle, (path.name for path in paths))

    def _map(self, name: str) -> None:
        descriptor = os.open(self.folder / name, os.O_RDONLY)
        self._mapped[name] = descriptor, _size_and_time(descriptor)
        self.data[name] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)

    @property
    def failure(self) -> PassError | None:
        """The error after which the files cannot be used any more: one was written; else None."""
        for name, (descriptor, before) in self._mapped.items():
            if _size_and_time(descriptor) != before:
                return changed(f"{name} was written while the bundle was open")
        return None


def changed(how: str) -> PassError:
    return PassError(f"the bundle has changed ({how}): open it again")


def _size_and_time(descriptor: int) -> tuple[int, int]:
    # Not the ctime, which also changes if the file gets another name, or none.
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _close(mapped: Mapping[str, tuple[int, object]]) -> None:
    for descriptor, _ in mapped.values():
        os.close(descriptor)
