"""Writes a trunk whose weights have the layout of ONNX Runtime's kernels (packed weights), and
checks its logits."""

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
from pass_runtime.backends.ort.kernels import Kernels
from pass_runtime.bundle.plan import make_cycle
from pass_runtime.errors import PassError

FORMAT_VERSION = 2
"""The version of the format of GRAPH_FILE and WEIGHTS_FILE. Increase it if the format changes."""
CPU_INFO = Path("/proc/cpuinfo")
FEATURE_FIELDS = ("flags", "Features")
"""Fields of CPU_INFO with the CPU's instruction sets, on x86 and on Arm."""
CPU_FIELDS = {
    *("vendor_id", "cpu family", "model", "model name", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
    *FEATURE_FIELDS,
}


def weight_key(graph: str, weights: str, kernels: Kernels) -> str | None:
    """Return a trunk's key on this machine, from the SHA-256 of its graph and of its weights; None
    if the CPU is unknown. Like the packed form, it depends on ONNX Runtime's build and on the CPU,
    but not on the number of threads. `kernels`, which were found by running them, are part of it
    because under emulation CPU_INFO describes another CPU."""
    cpu = describe_cpu()
    if cpu is None:
        return None
    build = f"{ort.__version__} {ort.get_build_info()}"
    text = f"format {FORMAT_VERSION}\nonnxruntime {build}\ngraph {graph}\nweights {weights}\n"
    return hashlib.sha256(f"{text}{kernels}\n{cpu}".encode()).hexdigest()[:32]


def describe_cpu() -> str | None:
    """Return the lines `field: value` of CPU_INFO that say of what kind the cores are, without
    repetitions. None if CPU_INFO does not list instruction sets."""
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
"""Every blob of weights begins at a multiple of this, more than any kernel needs. Kernels round
addresses inside a packed blob up to multiples of 64 bytes. The blob began at such a multiple when
it was packed, and must begin at one when it is read: else logits are wrong, or the process crashes.
ONNX Runtime itself aligns only blobs of more than 1 MiB."""
PROMPT_TOKENS = 16
"""The length of the prompt by which two sessions are compared."""

Probe = Callable[[ort.InferenceSession], Sequence[npt.NDArray[Any]]]
"""Computes logits with a session. Raises PassError if the session's graph is not the trunk's."""


class NotUsable(Exception):
    """A trunk's packed weights cannot be used on this machine, and trying again would not help."""


def pack(
    trunk: Path,
    directory: Path,
    threads: int,
    probe: Probe,
    other: tuple[Path, AlignedModel] | None = None,
    *,
    unsigned: bool = False,
) -> tuple[ort.InferenceSession, AlignedModel]:
    """Write GRAPH_FILE and WEIGHTS_FILE to `directory`. Returns a session over them, and their
    description. Raises NotUsable, or PassError if `trunk` cannot be opened or written.

    other: the directory and the description of another graph over the same weights. If its
    WEIGHTS_FILE has all blobs that this graph reads, link that file in place of writing one.
    unsigned: whether 8-bit activations are unsigned, as for `open_session`.
    """
    saved = directory / f"{SAVED_STEM}.onnx"
    saving = open_session(trunk, "cpu", threads, save=saved, unsigned=unsigned)
    try:
        aligned = _write(saved, directory, other)
    except UnknownFormat as error:
        raise NotUsable(f"ONNX Runtime wrote a model that is not understood: {error}") from None
    for file in (saved, saved.with_suffix(".data")):
        file.unlink()
    for name in aligned.files:
        _sync(directory / name)
    try:
        packed = open_session(directory / GRAPH_FILE, "cpu", threads, packed=True)
    except PassError as error:
        raise NotUsable(str(error)) from None
    if not all(np.array_equal(*pair) for pair in zip(probe(saving), probe(packed), strict=True)):
        raise NotUsable("the packed trunk computes other logits")
    return packed, aligned


def _write(saved: Path, directory: Path, other: tuple[Path, AlignedModel] | None) -> AlignedModel:
    data = f"{SAVED_STEM}.data"
    if other is not None:
        with suppress(OSError):  # The other graph's file may have been removed.
            linked = link(
                saved, data, directory / GRAPH_FILE, WEIGHTS_FILE, other[0] / WEIGHTS_FILE, other[1]
            )
            if linked is not None:
                return linked
    return align(saved, data, directory / GRAPH_FILE, WEIGHTS_FILE, ALIGNMENT_BYTES)


def sample_logits(
    backend: Backend, *, lookahead_rows: bool = True
) -> list[npt.NDArray[np.float32]]:
    """Return the logits [b,Q,V] of a new backend for the window of each plan after a prompt, b
    being 1 or 2. lookahead_rows: False leaves out the plans with look-ahead rows."""
    limits, length = backend.capabilities, backend.manifest.lookahead.length
    plans = [
        plan for mode in ("ar", "fused", "two-pass") for plan in make_cycle(mode, length).plans
    ]
    plans = [plan for plan in plans if lookahead_rows or not len(plan.lookahead_rows)]
    batch = limits.batch_size(min(limits.slots, 2))
    backend.resize(
        limits.capacity(PROMPT_TOKENS + max(plan.width for plan in plans)), [0] * limits.slots
    )
    tokens = [7919 * i % limits.vocab_size for i in range(PROMPT_TOKENS)]
    for slot in range(batch):
        backend.prefill(slot, 0, tokens, PROMPT_TOKENS)
    logits = []
    for plan in plans:
        for slot in range(batch):
            backend.stage(slot, plan, PROMPT_TOKENS, tokens[slot + 1], tokens[: plan.drafts])
        backend.run_trunk(plan, batch)
        logits.append(backend.logits(plan, batch))
    return logits


def release_free_memory() -> None:
    """Return to the system what ONNX Runtime has freed: glibc would keep tens of megabytes."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _sync(path: Path) -> None:
    """Write a file from the system's cache to the disk, so that it survives a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
