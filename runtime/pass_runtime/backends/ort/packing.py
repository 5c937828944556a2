"""Writes a trunk with packed weights, which have the layout that ONNX Runtime's kernels read, for
the cache in `packed_weights`, and checks that it computes the same logits."""

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
"""The version of the format of GRAPH_FILE and WEIGHTS_FILE, to be raised if the format changes."""
CPU_INFO = Path("/proc/cpuinfo")
FEATURE_FIELDS = ("flags", "Features")
"""The fields of CPU_INFO that list the CPU's instruction sets, on x86 and on Arm."""
CPU_FIELDS = {
    *("vendor_id", "cpu family", "model", "model name", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
    *FEATURE_FIELDS,
}
"""The fields of CPU_INFO that tell one kind of CPU from another, on x86 and on Arm."""


def weight_key(graph: str, weights: str, kernels: Kernels) -> str | None:
    """Return the key of a trunk's packed weights on this machine; None if the CPU is unknown.
    graph, weights: the SHA-256 of the trunk's files. Like the packed form, the key depends on ONNX
    Runtime's build and on the CPU, but not on the number of threads. `kernels`, which were found by
    running them, are part of it because under emulation CPU_INFO describes another CPU."""
    cpu = describe_cpu()
    if cpu is None:
        return None
    build = f"{ort.__version__} {ort.get_build_info()}"
    text = f"format {FORMAT_VERSION}\nonnxruntime {build}\ngraph {graph}\nweights {weights}\n"
    return hashlib.sha256(f"{text}{kernels}\n{cpu}".encode()).hexdigest()[:32]


def describe_cpu() -> str | None:
    """Return the lines `field: value` of CPU_INFO with CPU_FIELDS, without repetitions; None if it
    does not list instruction sets."""
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
"""The files of a trunk with packed weights."""
SAVED_STEM = "saved-by-onnxruntime"
"""The name, without suffix, of the files that ONNX Runtime writes, from which both are made."""
ALIGNMENT_BYTES = 4096
"""Every blob of weights begins at a multiple of this, more than any kernel needs. Kernels round
addresses inside a packed blob up to multiples of 64 bytes. The blob began at such a multiple when
it was packed, and must begin at one when it is read: else logits are wrong, or the process crashes.
ONNX Runtime itself aligns only blobs of more than 1 MiB."""
PROMPT_TOKENS = 16
"""The length of the prompt after which the logits of two sessions are compared."""

Probe = Callable[[ort.InferenceSession], Sequence[npt.NDArray[Any]]]
"""Computes logits with a session. Raises PassError if its graph is not that of the trunk."""


class NotUsable(Exception):
    """Packed weights of this trunk cannot be used on this machine, now or later."""


def pack(
    trunk: Path,
    directory: Path,
    threads: int,
    probe: Probe,
    other: tuple[Path, AlignedModel] | None = None,
    *,
    unsigned: bool = False,
) -> tuple[ort.InferenceSession, AlignedModel]:
    """Write GRAPH_FILE and WEIGHTS_FILE to `directory`, and return a session of them and their
    description. Raises NotUsable, or PassError if `trunk` cannot be opened or written.

    other: the directory and the description of another packed graph over the same weights. If its
    WEIGHTS_FILE has all blobs that this graph reads, link that file in place of writing one.
    probe: computes the logits by which the packed trunk is checked. unsigned: as for
    `open_session`.
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
    """Write both files from the graph `saved`, and return their description. other: see `pack`."""
    data = f"{SAVED_STEM}.data"
    if other is not None:
        other_directory, description = other
        with suppress(OSError):  # The other file may have been removed.
            weights = other_directory / WEIGHTS_FILE
            linked = link(saved, data, directory / GRAPH_FILE, WEIGHTS_FILE, weights, description)
            if linked is not None:
                return linked
    return align(saved, data, directory / GRAPH_FILE, WEIGHTS_FILE, ALIGNMENT_BYTES)


def sample_logits(
    backend: Backend, *, lookahead_rows: bool = True
) -> list[npt.NDArray[np.float32]]:
    """Return the logits [b,Q,V] that a new backend computes after a prompt for the window of each
    plan, in b = 1 or 2 slots. lookahead_rows: False leaves out plans with look-ahead rows."""
    capabilities, length = backend.capabilities, backend.manifest.lookahead.length
    plans = [
        plan for mode in ("ar", "fused", "two-pass") for plan in make_cycle(mode, length).plans
    ]
    plans = [plan for plan in plans if lookahead_rows or not len(plan.lookahead_rows)]
    batch = capabilities.batch_size(min(capabilities.slots, 2))
    max_tokens = PROMPT_TOKENS + max(plan.width for plan in plans)
    backend.resize(capabilities.capacity(max_tokens), [0] * capabilities.slots)
    # different tokens, since 7919 is a prime
    tokens = [7919 * i % capabilities.vocab_size for i in range(PROMPT_TOKENS)]
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
    """Return freed memory to the system: glibc would keep tens of megabytes of it."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _sync(path: Path) -> None:
    """Make the system write a file to the disk, so that the file survives a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
