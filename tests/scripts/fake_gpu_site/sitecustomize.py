"""With this directory first in PYTHONPATH, every Python process sees one GPU: the fakes of
tests/runtime/fake_gpu.py in place of cuda-python and TensorRT, made when they are imported.

FAKE_GPU: what is wrong with it, as JSON: `driver` (the CUDA version that it runs, 0 for none),
`limit` (bytes of memory), `fail_capture` (a function), `version` (of TensorRT), `hangs` (whether
memory is never given).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LIBRARY_CUDA = 13040
OLD_DRIVER = 35


WRONG = json.loads(os.environ.get("FAKE_GPU", "{}"))


@cache
def cuda() -> Any:
    sys.path.append(str(ROOT / "tests/runtime"))
    from fake_gpu import FakeCuda

    gpu = FakeCuda(limit=WRONG.get("limit", 1 << 30))
    gpu.fail_capture = WRONG.get("fail_capture", "")
    driver = WRONG.get("driver", LIBRARY_CUDA)
    gpu.cudaDriverGetVersion = lambda: (0, driver)
    gpu.cudaRuntimeGetVersion = lambda: (0, LIBRARY_CUDA)
    if driver < LIBRARY_CUDA // 1000 * 1000:
        gpu.cudaGetDeviceCount = lambda: (OLD_DRIVER, 0)
    if WRONG.get("hangs"):
        gpu.cudaMalloc = lambda _: time.sleep(3600)
    return gpu


@cache
def tensorrt() -> Any:
    device = cuda()
    from fake_gpu import FakeTensorRT

    library = FakeTensorRT(device)
    library.__version__ = WRONG.get("version", library.__version__)
    return library


def build_engines(bundle: Path, config: Any, _progress: Any) -> None:
    """Engines that the fake of TensorRT can load, in place of those that TensorRT would build."""
    cuda()
    from fake_gpu import add_fake_engines

    from pass_runtime.bundle.read import read_manifest
    from pass_runtime.errors import PassError

    if read_manifest(bundle).engines:
        raise PassError(f"{bundle} has engines fake already; use --force to build them again")
    add_fake_engines(bundle, config.max_seq_len)


class Replaced(Loader):
    """A module that `make` makes."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.make()

    def exec_module(self, module: ModuleType) -> None:
        pass


class WithFakeBuilds(Loader):
    """The real module of engine builds, but for what builds."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.real.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.real.exec_module(module)
        module.build_engines = build_engines


class FakeGpuFinder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if made := {"cuda.bindings.runtime": cuda, "tensorrt": tensorrt}.get(name):
            return ModuleSpec(name, Replaced(made))
        if name != "pass_exporter.engines.build":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = WithFakeBuilds(spec.loader)
        return spec


sys.meta_path.insert(0, FakeGpuFinder())
