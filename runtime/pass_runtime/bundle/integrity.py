"""Checks that a bundle's files are the ones that were exported, by size and SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES, FILE_NAME, TOKENIZER_FILE, FileInfo, Graph, Manifest
from pass_runtime.bundle.remembered import Remembered
from pass_runtime.errors import PassError


def verify_files(
    bundle: Path, manifest: Manifest, *, hashes: bool = True, remembered: Remembered | None = None
) -> None:
    """Check that every file of the bundle exists and is the one that was exported.

    remembered: known hashes, so that files that have not changed since are not read again. None reads every file.
    """
    for name, info in manifest.files.items():
        path = bundle / name
        if not path.is_file():
            raise PassError(f"{path} is missing; export the bundle again")
        if path.stat().st_size != info.bytes:
            raise PassError(
                f"{path} has {path.stat().st_size} bytes instead of {info.bytes}; copy or export the bundle again"
            )
        if hashes and not has_hash(path, info.sha256, remembered):
            raise PassError(f"{path} does not match its SHA-256 in {FILE_NAME}; copy or export the bundle again")
    listed = {TOKENIZER_FILE, *(graph.file for graph in _graphs(manifest))}
    listed |= {derived.file for derived in manifest.derived}
    listed |= {file for file in CHAT_TEMPLATE_FILES.values() if (bundle / file).exists()}
    if missing := sorted(listed - set(manifest.files)):
        raise PassError(f"{bundle / FILE_NAME}: {missing[0]} is used but not listed under files")


def has_hash(path: Path, sha256: str, remembered: Remembered | None = None) -> bool:
    """Whether a file has this hash, by its content or by what is remembered of an unchanged file."""
    return _read(path) == sha256 if remembered is None else remembered.matches(path, sha256, _read)


def _read(path: Path) -> str:
    return file_info(path).sha256


def file_info(path: Path, progress: Callable[[int], None] | None = None) -> FileInfo:
    """Size and SHA-256, read in 4 MiB pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            size += len(piece)
            if progress is not None:
                progress(len(piece))
    return FileInfo(sha256=digest.hexdigest(), bytes=size)


def _graphs(manifest: Manifest) -> Iterable[Graph]:
    yield manifest.trunk
    yield manifest.logprobs
    if manifest.processors is not None:
        yield manifest.processors
    for plan in manifest.plans:
        yield from plan.tails.values()
