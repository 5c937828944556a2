"""Gives a Python process one fake GPU: imports of cuda-python and TensorRT return the fakes of
tests/runtime (fake_cuda.py, fake_tensorrt.py). Python imports this file at its start if PYTHONPATH
has its directory.

The environment variable FAKE_GPU holds the GPU's faults as JSON: `driver` (the newest CUDA version
that the driver runs; 0: there is no driver), `limit` (bytes of memory), `fail_capture` (the
function that fails in a capture), `version` (of TensorRT), `hangs` (whether an allocation never
returns)."""

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
"""The CUDA version of the library, as CUDA writes 13.4."""
OLD_DRIVER_ERROR = 35
FAULTS = json.loads(os.environ.get("FAKE_GPU", "{}"))


@cache
def fake_cuda() -> Any:
    """Return the stand-in for cuda.bindings.runtime."""
    sys.path.append(str(ROOT / "tests/runtime"))
    from fake_cuda import FakeCuda

    gpu = FakeCuda(limit=FAULTS.get("limit", 1 << 30))
    gpu.fail_capture = FAULTS.get("fail_capture", "")
    driver = FAULTS.get("driver", LIBRARY_CUDA)
    gpu.cudaDriverGetVersion = lambda: (0, driver)
    gpu.cudaRuntimeGetVersion = lambda: (0, LIBRARY_CUDA)
    if driver < LIBRARY_CUDA // 1000 * 1000:
        gpu.cudaGetDeviceCount = lambda: (OLD_DRIVER_ERROR, 0)
    if FAULTS.get("hangs"):
        gpu.cudaMalloc = lambda _: time.sleep(3600)
    return gpu


@cache
def fake_tensorrt() -> Any:
    device = fake_cuda()  # which also makes fake_tensorrt importable
    from fake_tensorrt import FakeTensorRT

    library = FakeTensorRT(device)
    library.__version__ = FAULTS.get("version", library.__version__)
    return library


def build_engines(bundle: Path, config: Any, _progress: Any) -> None:
    """Stand in for `build_engines` of the exporter: add engines that the fake TensorRT can load."""
    fake_cuda()
    from fake_engines import add_fake_engines

    from pass_runtime.bundle.read import read_manifest
    from pass_runtime.errors import PassError

    if read_manifest(bundle).engines:
        raise PassError(f"{bundle} has engines fake already; use --force to build them again")
    add_fake_engines(bundle, config.max_seq_len)


class FakeModule(Loader):
    """Loads what `make` returns as a module."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.make()

    def exec_module(self, module: ModuleType) -> None:
        pass


class WithFakeBuilds(Loader):
    """Loads a module by the loader `real`, and replaces its `build_engines`."""

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
        fakes = {"cuda.bindings.runtime": fake_cuda, "tensorrt": fake_tensorrt}
        if make := fakes.get(name):
            return ModuleSpec(name, FakeModule(make))
        if name != "pass_exporter.engines.build":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = WithFakeBuilds(spec.loader)
        return spec


sys.meta_path.insert(0, FakeGpuFinder())
