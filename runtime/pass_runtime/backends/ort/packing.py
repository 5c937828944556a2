"""Has ONNX Runtime write a trunk with packed weights, and checks that it computes the same."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.base import Backend
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.backends.ort.external_data import UnknownForm, align
from pass_runtime.bundle.manifest import FileInfo
from pass_runtime.bundle.plan import make_cycle
from pass_runtime.errors import PassError

GRAPH, WEIGHTS = "trunk.onnx", "trunk.data"
SAVED = "saved-by-onnxruntime"
ALIGNMENT = 4096
"""Every blob of weights begins at a multiple of this. ONNX Runtime's kernels align addresses inside a packed blob, so
it must lie as it did when it was packed, at a multiple of the 64 bytes that ONNX Runtime allocates at: elsewhere logits
are wrong, or the process ends. ONNX Runtime itself aligns only blobs of more than 1 MiB. A page is more than what any
kernel aligns to."""
PROMPT = 16
"""The tokens of the prompt by which two sessions are compared."""

Probe = Callable[[ort.InferenceSession], Sequence[npt.NDArray[Any]]]
"""Logits that a session over the trunk computes; PassError where it is none."""


class NotUsable(Exception):
    """Why a trunk's weights cannot be used packed, here and whenever it is tried."""


def pack(
    trunk: Path, directory: Path, threads: int, probe: Probe
) -> tuple[ort.InferenceSession, Mapping[str, FileInfo]]:
    """Write GRAPH and WEIGHTS to `directory`. Returns a session over them, and their sizes and hashes. Raises
    NotUsable, or PassError where `trunk` cannot be opened or written."""
    saved = directory / f"{SAVED}.onnx"
    packing = open_session(trunk, "cpu", threads, save=saved)
    try:
        files = align(saved, f"{SAVED}.data", directory / GRAPH, WEIGHTS, ALIGNMENT)
    except UnknownForm as error:
        raise NotUsable(f"ONNX Runtime wrote a model that is not understood: {error}") from None
    for file in (saved, saved.with_suffix(".data")):
        file.unlink()
    for name in files:
        _sync(directory / name)
    try:
        mapping = open_session(directory / GRAPH, "cpu", threads, ready=True)
    except PassError as error:
        raise NotUsable(str(error)) from None
    if not all(np.array_equal(*pair) for pair in zip(probe(packing), probe(mapping), strict=True)):
        raise NotUsable("with them the trunk computes other logits")
    del packing
    _give_back_memory()
    return mapping, files


def sample_logits(backend: Backend) -> list[npt.NDArray[np.float32]]:
    """Logits of a new backend after a prompt, in one slot or two: of windows of one row, and of those that have all
    kinds of rows."""
    limits, length = backend.capabilities, backend.manifest.lookahead.length
    plans = [plan for mode in ("ar", "fused") for plan in make_cycle(mode, length).plans]
    batch = limits.batch_size(min(limits.slots, 2))
    backend.resize(limits.capacity(PROMPT + max(plan.width for plan in plans)), [0] * limits.slots)
    tokens = [7919 * i % limits.vocab_size for i in range(PROMPT)]
    for slot in range(batch):
        backend.prefill(slot, 0, tokens, PROMPT)
    found = []
    for plan in plans:
        for slot in range(batch):
            backend.stage(slot, plan, PROMPT, tokens[slot + 1], tokens[: plan.drafts])
        backend.run_trunk(plan, batch)
        found.append(backend.logits(plan, batch))
    return found


def _give_back_memory() -> None:
    """Have the C library return the memory of a closed session to the system; glibc keeps it otherwise."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _sync(path: Path) -> None:
    """Have the system write a file to the disk, so that it is whole even where the machine fails afterwards."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
