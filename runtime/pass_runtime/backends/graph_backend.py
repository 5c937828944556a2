"""A backend that runs a bundle's graphs over named device buffers: what ONNX Runtime and TensorRT have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.base import Backend, Capabilities
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.noise import STREAMS
from pass_runtime.bundle.plan import Plan, prefill_plan
from pass_runtime.bundle.sampling import SamplingParams


class Writable(Protocol):
    """Named device memory that the host can write: the same name and shape is the same memory."""

    def put(self, name: str, array: npt.NDArray[Any]) -> Any: ...


class GraphBackend(Backend):
    """Fills the buffers; a subclass runs the graphs that are bound to them (see `pass_runtime.bundle.bindings`)."""

    def __init__(self, bundle: Path, manifest: Manifest, capabilities: Capabilities, buffers: Writable) -> None:
        super().__init__(capabilities)
        self._bundle, self._manifest = bundle, manifest
        self._writable = buffers
        self._params = SamplingParams()
        self._writable.put("active", np.ones(1, np.int64))

    def _begin(self, params: SamplingParams) -> None:
        self._params = params
        if params.sampler == "greedy":
            return
        put = self._writable.put
        for stream in STREAMS if self._manifest.rule == "rejection" else STREAMS[:1]:
            put(stream, self._noise_offsets(params.seed, stream)[None])
        put("temperature", np.array([params.temperature], np.float32))
        put("top_k", np.array([params.top_k], np.int64))
        put("top_p", np.array([params.top_p], np.float32))
        put("min_p", np.array([params.min_p], np.float32))

    def _prefill(self, tokens: Sequence[int], width: int) -> None:
        ids = np.zeros((1, width), np.int64)
        ids[0, : len(tokens)] = tokens
        self._put_window(ids)
        self._run_prefill(prefill_plan(width), np.array([len(tokens) - 1], np.int64))

    def _enter(self, ids: npt.NDArray[np.int64], plan: Plan) -> None:
        self._put_window(ids[None])
        if plan.drafts and self._manifest.rule == "rejection" and self._params.sampler != "greedy":
            # A draft from elsewhere was certain to be drawn; one that is missing could not be.
            vocab = self.capabilities.vocab_size
            drafts = ids[1 : 1 + plan.drafts, None] == np.arange(vocab)
            self._writable.put("draft_probs", drafts[None].astype(np.float32))

    def _put_window(self, ids: npt.NDArray[np.int64]) -> None:
        self._writable.put("input_ids", ids)
        self._writable.put("length", np.array([self.length], np.int64))

    @abstractmethod
    def _run_prefill(self, plan: Plan, logit_rows: npt.NDArray[np.int64]) -> None:
        """Run the trunk over the window in place; only its K/V matter."""
