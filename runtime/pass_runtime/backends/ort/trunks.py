"""Opens the sessions of a trunk, and binds sessions of trunks and tails to memory, so that CUDA can
capture their runs.

With its option `enable_cuda_graph`, ONNX Runtime executes a graph three times in the first run with
a new `gpu_graph_id`: it runs the graph until that allocates no more memory (twice), captures it,
which computes nothing, and launches the captured graph (`InferenceSession::Run` and
`CUDAExecutionProvider::OnRunEnd`). A tail writes the next window over the one that it reads, so it
would advance three times. Therefore the inputs that a graph overwrites are saved before its first
run and restored after it, and the graph is run once more.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.devices import split_device
from pass_runtime.backends.memory import Memory
from pass_runtime.backends.ort.engine import PROVIDERS, check_graph, open_session
from pass_runtime.backends.ort.kernels import HOW_TO_GET, Kernels, find_kernels
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.plan import Plan
from pass_runtime.errors import PassError

log = logging.getLogger("pass_runtime.backends")
device_log = logging.getLogger("pass_runtime.device")

Key = TypeVar("Key", bound=Hashable)
OnFailure = Callable[[str], None]
"""A function that is called with the reason why a run could not be captured."""

NO_GRAPH_ID = -1
"""The `gpu_graph_id` with which ONNX Runtime neither captures nor replays."""


@dataclass(frozen=True)
class BoundTensor:
    """A graph's input or output, with the address of its memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int


class BoundSession:
    """A session that is bound to memory for its inputs and outputs. On CUDA, its run is captured
    under the number `graph_id`, and replayed: addresses and shapes stay the same."""

    def __init__(
        self,
        session: ort.InferenceSession,
        binding: ort.IOBinding,
        graph_id: int,
        memory: Memory,
        overwritten: Sequence[BoundTensor],
        on_failure: OnFailure,
    ) -> None:
        """overwritten: the inputs whose memory an output overwrites, without the KV cache, where
        repeated runs write the same. on_failure: called with the reason if the capture fails."""
        self._session, self._binding, self._memory = session, binding, memory
        self._overwritten, self._on_failure = overwritten, on_failure
        self._options = _run_options(graph_id)
        self._captures: bool = session.captures  # `open_session` sets this attribute

    def run(self) -> None:
        """Run the session. Raises PassError if ONNX Runtime fails, as when memory runs out."""
        if self._captures:
            self._capture()
            self._captures = False
        else:
            self._run()

    def _capture(self) -> None:
        """Run for the first time, which captures. If that fails, run uncaptured, now and later."""
        saved = [np.empty(tensor.shape, tensor.dtype) for tensor in self._overwritten]
        for array, tensor in zip(saved, self._overwritten, strict=True):
            self._memory.download(array, tensor.address)
        try:
            self._run()
        except PassError as error:
            self._memory.check_device()
            self._options = _run_options(NO_GRAPH_ID)
            self._put_back(saved)
            self._run()
            self._on_failure(str(error))
            return
        if saved:  # The graph was executed three times.
            self._put_back(saved)
            self._run()

    def _put_back(self, saved: Sequence[npt.NDArray[Any]]) -> None:
        """Restore the inputs that a run has overwritten."""
        for array, tensor in zip(saved, self._overwritten, strict=True):
            self._memory.upload(tensor.address, array)

    def _run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # onnxruntime raises bare classes of its own
            raise PassError(
                f"onnxruntime failed to run a pass: {' '.join(str(error).split())}"
            ) from None


class BoundSessions(Generic[Key]):
    """The most recently used bound sessions, by key. ONNX Runtime keeps every CUDA graph that it
    captured, so a session that is bound to the same addresses again gets its old graph id."""

    MAX_BOUND = 256
    _new_graph_ids = itertools.count(1)

    def __init__(self) -> None:
        self._bound: OrderedDict[Key, BoundSession] = OrderedDict()
        self._graph_ids: dict[Key, int] = {}

    def get(self, key: Key, make: Callable[[int], BoundSession]) -> BoundSession:
        """Return the bound session of `key`, or bind one by `make`, which gets the graph id."""
        if key not in self._bound:
            self._bound[key] = make(self._graph_ids.setdefault(key, next(self._new_graph_ids)))
            if len(self._bound) > self.MAX_BOUND:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        return self._bound[key]

    def clear(self) -> None:
        """Forget all bound sessions, because addresses have changed."""
        self._bound.clear()
        self._graph_ids.clear()


def bind(
    session: ort.InferenceSession,
    device: str,
    inputs: Sequence[BoundTensor],
    outputs: Sequence[BoundTensor],
    kv_cache: tuple[Sequence[BoundTensor], Sequence[BoundTensor]],
    graph_id: int,
    memory: Memory,
    on_failure: OnFailure,
) -> BoundSession:
    """Bind `session` to the addresses of its inputs and outputs. kv_cache: inputs and outputs that
    are the KV cache. graph_id, memory, on_failure: as for `BoundSession`."""
    kind, ordinal = split_device(device)
    binding, memory_name = session.io_binding(), PROVIDERS[kind][1]
    for bind_tensor, tensors in (
        (binding.bind_input, (*inputs, *kv_cache[0])),
        (binding.bind_output, (*outputs, *kv_cache[1])),
    ):
        for each in tensors:
            dtype = np.dtype(each.dtype)
            bind_tensor(each.name, memory_name, ordinal, dtype, each.shape, each.address)
    written = {tensor.address for tensor in outputs}
    overwritten = [tensor for tensor in inputs if tensor.address in written]
    return BoundSession(session, binding, graph_id, memory, overwritten, on_failure)


def _run_options(graph_id: int) -> ort.RunOptions:
    """Return the options of a run that captures or replays the CUDA graph `graph_id`."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options


@dataclass(frozen=True)
class Trunks:
    """The sessions of the trunk: `plain` runs passes without look-ahead rows, `lookahead` those
    with look-ahead rows. `lookahead` is opened for the first such pass, and may be `plain`."""

    plain: ort.InferenceSession
    open_lookahead: Callable[[], ort.InferenceSession]

    @cached_property
    def lookahead(self) -> ort.InferenceSession:
        return self.open_lookahead()

    def of(self, plan: Plan) -> ort.InferenceSession:
        """Return the session that runs passes of `plan`."""
        return self.lookahead if len(plan.lookahead_rows) else self.plain


def cpu_kernels(manifest: Manifest, device: str) -> Kernels | str | None:
    """Return the library that the bundle's trunk for `device` needs, or the reason why it is
    missing; None if that trunk needs no library."""
    needed = split_device(device)[0] == "cpu" and manifest.derived_trunk("cpu", 1) is not None
    return find_kernels() if needed else None


def open_trunk(
    files: OpenFiles,
    manifest: Manifest,
    device: str,
    slots: int,
    threads: int,
    *,
    exact: bool = False,
) -> Trunks:
    """Open the trunk. On the CPU one session runs all passes: of our own kernels, or of the
    portable trunk where these are missing. On CUDA, if the bundle has a trunk for passes without
    look-ahead rows, that is opened now, and the other trunk at the first pass with look-ahead rows.
    slots: the largest batch size. exact: open the portable trunk, with `exact` (see
    `open_session`). Raises PassError if the bundle has no trunk that can run."""

    def open_file(file: str) -> ort.InferenceSession:
        session = open_session(files.folder / file, device, threads, exact=exact, files=files)
        check_graph(session, manifest.trunk, manifest)
        return session

    kind, _ = split_device(device)
    lookahead_file, plain_file = (
        manifest.trunk_file(kind, slots, lookahead_rows=rows) for rows in (True, False)
    )
    found = cpu_kernels(manifest, device)
    missing = found if isinstance(found, str) else None
    if exact or missing is not None:
        lookahead_file = plain_file = manifest.trunk.file
    if plain_file not in files.graphs:
        remedy = (
            f"its kernels are missing ({missing}): {HOW_TO_GET}"
            if missing is not None
            else "it was exported for the CPU alone: export it with --target any"
        )
        raise PassError(f"{files.folder} cannot run: {remedy}")
    if missing is not None and not exact:
        device_log.warning(
            "ONNX Runtime's kernels run in place of ours, which are missing (%s): passes are "
            "slower, and near-ties may flip; %s",
            missing,
            HOW_TO_GET,
        )
    plain = open_file(plain_file)
    return Trunks(
        plain, lambda: plain if lookahead_file == plain_file else open_file(lookahead_file)
    )
