"""The sessions over a bundle's trunk: for passes with look-ahead rows, and for passes without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy.typing as npt
import onnxruntime as ort

from pass_runtime.backends.device_names import split_device
from pass_runtime.backends.ort.engine import check_graph, open_session
from pass_runtime.backends.ort.packed_weights import WeightCache
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.plan import Plan


@dataclass(frozen=True)
class Trunks:
    """The sessions of the trunk, which may be the same one: `plain` for passes without look-ahead rows, and `drafting`
    for those with them, which `open_drafting` opens when the first one comes."""

    plain: ort.InferenceSession
    open_drafting: Callable[[], ort.InferenceSession]

    @cached_property
    def drafting(self) -> ort.InferenceSession:
        return self.open_drafting()

    def of(self, plan: Plan) -> ort.InferenceSession:
        """The session that runs passes of `plan`."""
        return self.drafting if len(plan.lookahead_rows) else self.plain


class Probe(Protocol):
    """Logits that a session computes, of windows with look-ahead rows or without."""

    def __call__(self, trunk: ort.InferenceSession, *, lookahead_rows: bool) -> Sequence[npt.NDArray[Any]]: ...


def open_trunk(
    bundle: Path, manifest: Manifest, device: str, slots: int, threads: int, *, exact: bool = False
) -> Trunks:
    """One session for all passes. exact: passed to `open_session`."""
    kind, _ = split_device(device)
    session = open_session(bundle / manifest.trunk_file(kind, slots), device, threads, exact=exact)
    check_graph(session, manifest.trunk, manifest)
    return Trunks(session, lambda: session)


def open_packed(bundle: Path, manifest: Manifest, slots: int, threads: int, cache: WeightCache, probe: Probe) -> Trunks:
    """Sessions on the CPU over packed weights: two where the bundle has two graphs, because they share the weights in
    memory. Without packed weights it is one."""
    drafting, plain = (manifest.trunk_file("cpu", slots, lookahead_rows=rows) for rows in (True, False))

    def map_weights(file: str, like: str | None = None) -> ort.InferenceSession | None:
        def logits(trunk: ort.InferenceSession) -> Sequence[npt.NDArray[Any]]:
            check_graph(trunk, manifest.trunk, manifest)
            return probe(trunk, lookahead_rows=file == drafting)

        session = cache.open(bundle, manifest, file, threads, logits, like)
        if session is not None:
            check_graph(session, manifest.trunk, manifest)
        return session

    def open_unpacked() -> Trunks:
        return open_trunk(bundle, manifest, "cpu", slots, threads)

    # The weights of the graph that reads all of them are packed first, as the other one is linked to them.
    first = None
    if plain == drafting or not cache.has(bundle, manifest, drafting):
        first = map_weights(drafting)
        if first is None:
            return open_unpacked()
    if plain != drafting:
        session = map_weights(plain, like=drafting)
        if session is not None:
            return Trunks(session, lambda: first or map_weights(drafting) or open_unpacked().plain)
    single = first or map_weights(drafting)
    return open_unpacked() if single is None else Trunks(single, lambda: single)
