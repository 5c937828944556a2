"""Gives a Python process one fake GPU: imports of cuda-python and TensorRT return the fakes of
tests/runtime. Python imports this file at its start if PYTHONPATH has its directory.

FAKE_GPU holds the GPU's faults as JSON: `driver` (the newest CUDA version that it runs) and
`fail_capture` (the function that fails in a capture)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LIBRARY_CUDA, OLD_DRIVER_ERROR = 13040, 35
FAULTS = json.loads(os.environ.get("FAKE_GPU", "{}"))


@cache
def fake_cuda() -> Any:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "runtime"))
    from fake_cuda import FakeCuda

    gpu = FakeCuda(limit=1 << 30)
    gpu.fail_capture = FAULTS.get("fail_capture", "")
    driver = FAULTS.get("driver", LIBRARY_CUDA)
    gpu.cudaDriverGetVersion = lambda: (0, driver)
    gpu.cudaRuntimeGetVersion = lambda: (0, LIBRARY_CUDA)
    if driver < LIBRARY_CUDA // 1000 * 1000:
        gpu.cudaGetDeviceCount = lambda: (OLD_DRIVER_ERROR, 0)
    return gpu


@cache
def fake_tensorrt() -> Any:
    device = fake_cuda()  # which also makes fake_tensorrt importable
    from fake_tensorrt import FakeTensorRT

    return FakeTensorRT(device)


def build_engines(bundle: Path, config: Any, _progress: Any) -> Any:
    """Add engines that the fake TensorRT can load, and return the report of none."""
    fake_cuda()
    from fake_engines import add_fake_engines

    add_fake_engines(bundle, config.max_seq_len)
    engine = SimpleNamespace(profiles=())
    engines = SimpleNamespace(engines=[engine], path=Path, targets=(), capacities=(0,))
    return SimpleNamespace(engines=engines, resumed=0, bytes=0, memory="", comparisons=())


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
