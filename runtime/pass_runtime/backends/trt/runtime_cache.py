"""The kernels that TensorRT-RTX compiled for a GPU, kept beside the engines for the next process.

TensorRT-RTX compiles kernels for the shapes of a context when it runs first. By default it does so in the background,
runs a slower kernel meanwhile, and then takes the new one, of which a captured graph knows nothing. Contexts made here
compile before they run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from pass_runtime.errors import PassError
from pass_runtime.files import write_whole

log = logging.getLogger("pass_runtime.backends")


class RuntimeCache:
    """One for all engines of a set, which lives as long as their contexts. Where its file cannot be read or written,
    kernels are compiled again, and nothing else is different."""

    def __init__(self, library: Any, path: Path) -> None:
        self._library, self._path = library, path
        self._cache: Any = None
        self._known = b""

    def config(self, engine: Any) -> Any:
        """What contexts of `engine` are made with."""
        library, config = self._library, engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(library.ExecutionContextAllocationStrategy.USER_MANAGED)
        config.dynamic_shapes_kernel_specialization_strategy = library.DynamicShapesKernelSpecializationStrategy.EAGER
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._load()
        if not config.set_runtime_cache(self._cache):
            log.warning("kernels are compiled again in every process: the library takes no cache of them")
        return config

    def _load(self) -> None:
        try:
            self._known = self._path.read_bytes()
        except OSError:
            return
        # One of another GPU, driver or version is refused, and replaced later.
        if not self._cache.deserialize(self._known):
            self._known = b""

    def save(self) -> None:
        """Keep the kernels that were compiled since the last time, where there are any."""
        if self._cache is None:
            return
        found = bytes(self._cache.serialize())
        if found == self._known:
            return
        try:
            write_whole(self._path, found)
            self._known = found
        except PassError as error:
            log.info("compiled kernels are not kept for the next process: %s", error)

    def close(self) -> None:
        """Let go of it, after all contexts."""
        self._cache = None
