"""Has ONNX Runtime write a trunk with packed weights, and checks that it computes the same.

The name of packed weights is a hash of all that their form depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.base import Backend
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.backends.ort.external_data import AlignedModel, UnknownFormat, align, link
from pass_runtime.bundle.plan import make_cycle
from pass_runtime.errors import PassError

FORMAT_VERSION = 1
"""Changes with the content of an entry."""
CPU_INFO = Path("/proc/cpuinfo")
FEATURE_FIELDS = ("flags", "Features")
"""The instructions that a CPU has, on x86 and on Arm."""
CPU_FIELDS = {
    *("vendor_id", "cpu family", "model", "model name", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
    *FEATURE_FIELDS,
}


def weight_key(graph: str, weights: str) -> str | None:
    """The key of a trunk on this machine, from the hashes of its graph and its weights; None where the CPU is unknown.

    Kernels, and the forms they read, are chosen by the CPU's instructions and by the build of ONNX Runtime; the number
    of threads changes no form.
    """
    cpu = describe_cpu()
    if cpu is None:
        return None
    build = f"{ort.__version__} {ort.get_build_info()}"
    text = f"format {FORMAT_VERSION}\nonnxruntime {build}\ngraph {graph}\nweights {weights}\n{cpu}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe_cpu() -> str | None:
    """What Linux tells of the kinds of cores that this machine has: lines `field: value`, each once, in its order. None
    where it does not tell their instructions."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    lines: dict[str, None] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in CPU_FIELDS:
            lines[f"{name.strip()}: {value.strip()}\n"] = None
    return "".join(lines) if any(line.startswith(FEATURE_FIELDS) for line in lines) else None


GRAPH_FILE, WEIGHTS_FILE = "trunk.onnx", "trunk.data"
SAVED_STEM = "saved-by-onnxruntime"
ALIGNMENT_BYTES = 4096
"""Every blob of weights begins at a multiple of this. ONNX Runtime's kernels align addresses inside a packed blob, so
it must lie as it did when it was packed, at a multiple of the 64 bytes that ONNX Runtime allocates at: elsewhere logits
are wrong, or the process ends. ONNX Runtime itself aligns only blobs of more than 1 MiB. A page is more than what any
kernel aligns to."""
PROMPT_TOKENS = 16
"""The tokens of the prompt by which two sessions are compared."""

Probe = Callable[[ort.InferenceSession], Sequence[npt.NDArray[Any]]]
"""Logits that a session over the trunk computes; PassError where it is none."""


class NotUsable(Exception):
    """Why a trunk's weights cannot be used packed, here and whenever it is tried."""


def pack(
    trunk: Path, directory: Path, threads: int, probe: Probe, like: tuple[Path, AlignedModel] | None = None
) -> tuple[ort.InferenceSession, AlignedModel]:
    """Write GRAPH_FILE and WEIGHTS_FILE to `directory`. Returns a session over them, and what they are. Raises NotUsable, or
    PassError where `trunk` cannot be opened or written.

    like: a directory with another graph over the same weights. Where its WEIGHTS_FILE have all that this graph reads, they
    are linked and not written again.
    """
    saved = directory / f"{SAVED_STEM}.onnx"
    packing = open_session(trunk, "cpu", threads, save=saved)
    try:
        aligned = _write(saved, directory, like)
    except UnknownFormat as error:
        raise NotUsable(f"ONNX Runtime wrote a model that is not understood: {error}") from None
    for file in (saved, saved.with_suffix(".data")):
        file.unlink()
    for name in aligned.files:
        _sync(directory / name)
    try:
        mapping = open_session(directory / GRAPH_FILE, "cpu", threads, packed=True)
    except PassError as error:
        raise NotUsable(str(error)) from None
    if not all(np.array_equal(*pair) for pair in zip(probe(packing), probe(mapping), strict=True)):
        raise NotUsable("with them the trunk computes other logits")
    return mapping, aligned


def _write(saved: Path, directory: Path, like: tuple[Path, AlignedModel] | None) -> AlignedModel:
    data = f"{SAVED_STEM}.data"
    if like is not None:
        with suppress(OSError):  # The other entry was removed meanwhile.
            linked = link(saved, data, directory / GRAPH_FILE, WEIGHTS_FILE, like[0] / WEIGHTS_FILE, like[1])
            if linked is not None:
                return linked
    return align(saved, data, directory / GRAPH_FILE, WEIGHTS_FILE, ALIGNMENT_BYTES)


def sample_logits(backend: Backend, *, lookahead_rows: bool = True) -> list[npt.NDArray[np.float32]]:
    """Logits of a new backend after a prompt, in one slot or two: of windows of one row, and of wider ones, with all
    kinds of rows or without look-ahead rows."""
    limits, length = backend.capabilities, backend.manifest.lookahead.length
    plans = [plan for mode in ("ar", "fused", "two-pass") for plan in make_cycle(mode, length).plans]
    plans = [plan for plan in plans if lookahead_rows or not len(plan.lookahead_rows)]
    batch = limits.batch_size(min(limits.slots, 2))
    backend.resize(limits.capacity(PROMPT_TOKENS + max(plan.width for plan in plans)), [0] * limits.slots)
    tokens = [7919 * i % limits.vocab_size for i in range(PROMPT_TOKENS)]
    for slot in range(batch):
        backend.prefill(slot, 0, tokens, PROMPT_TOKENS)
    found = []
    for plan in plans:
        for slot in range(batch):
            backend.stage(slot, plan, PROMPT_TOKENS, tokens[slot + 1], tokens[: plan.drafts])
        backend.run_trunk(plan, batch)
        found.append(backend.logits(plan, batch))
    return found


def release_free_memory() -> None:
    """Have the C library return to the system what ONNX Runtime has freed: glibc keeps tens of megabytes otherwise."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _sync(path: Path) -> None:
    """Have the system write a file to the disk, so that it is whole even where the machine fails afterwards."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
