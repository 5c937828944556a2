"""What all engines of one session have in common: the library, the device, scratch memory, what the library says."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.trt.library import make_logger
from pass_runtime.backends.trt.runtime_cache import RuntimeCache

log = logging.getLogger("pass_runtime.backends")
KEPT_ERRORS = 4
"""How many of the library's last errors a message repeats."""


@dataclass
class Scratch:
    """Device memory for activations. All contexts of all engines share it, because only one of them runs at a time.

    Where an engine needs more than those before it, it gets a new block; contexts and graphs that refer to an older one
    go on using that.
    """

    cuda: Cuda
    size: int = 0
    address: int = 0

    def reserve(self, size: int) -> tuple[int, int]:
        """The address and the size of a block of at least `size` bytes."""
        if size > self.size or not self.address:
            self.address, self.size = self.cuda.allocate(size), size
        return self.address, self.size


@dataclass
class Shared:
    """library: the TensorRT module. cache: of the kernels that it compiles at run time, None where it compiles none."""

    library: Any
    cuda: Cuda
    cache: RuntimeCache | None
    scratch: Scratch = field(init=False)
    runtime: Any = field(init=False)
    _errors: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_ERRORS))

    def __post_init__(self) -> None:
        self.scratch = Scratch(self.cuda)
        self._logger = make_logger(self.library, self._errors, log)
        self.runtime = self.library.Runtime(self._logger)

    def save_kernels(self) -> None:
        """Keep what was compiled until now for the next process, where the library compiles at run time."""
        if self.cache is not None:
            self.cache.save()

    def listen(self) -> None:
        """Forget what the library said until now, so that `reason` tells of what comes."""
        self._errors.clear()

    def reason(self) -> str:
        """Why the call that just failed did: what the library said of it, and the CUDA error; DeviceLost where the
        device is lost."""
        met = self.cuda.why()
        said = [*dict.fromkeys(self._errors), *([met] if met else [])]
        self._errors.clear()
        return "; ".join(said)[:600] or "it gave no reason"
