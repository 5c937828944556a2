"""Which device ONNX Runtime opens, by its build, its packages and the visible GPUs."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import onnxruntime as ort
import pytest
from fake_gpu import FakeCuda

from pass_runtime import packages
from pass_runtime.backends.ort import engine
from pass_runtime.backends.ort.engine import choose_device
from pass_runtime.commands.errors import importing
from pass_runtime.errors import PassError


def driver(version: int, answer: tuple[int, int]) -> SimpleNamespace:
    """CUDA with a driver for this version (0: none), and the answer of cudaGetDeviceCount."""
    return SimpleNamespace(
        cudaGetDeviceCount=lambda: answer,
        cudaDriverGetVersion=lambda: (0, version),
        cudaRuntimeGetVersion=lambda: (0, 13040),
    )


NO_DRIVER, OLD_DRIVER, NO_GPU = driver(0, (35, 0)), driver(12040, (35, 0)), driver(13040, (0, 0))
REPAIR = "run: pip uninstall --yes onnxruntime onnxruntime-gpu && pip install 'pass-toolkit[gpu]'"


def machine(monkeypatch: pytest.MonkeyPatch, api: object, *, has_cuda: bool) -> None:
    """This machine has these GPUs, and an onnxruntime with or without CUDA."""
    providers = [*(["CUDAExecutionProvider"] if has_cuda else []), "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: providers)
    monkeypatch.setattr("pass_runtime.backends.cuda.import_api", lambda: api)
    monkeypatch.setattr(engine, "import_api", lambda: api)


@pytest.mark.parametrize(
    ("api", "has_cuda", "device", "level", "told"),
    [
        (FakeCuda(), True, "cuda", None, ""),
        (FakeCuda(), False, "cpu", logging.WARNING, REPAIR),
        (NO_GPU, True, "cpu", logging.WARNING, "not hidden by CUDA_VISIBLE_DEVICES"),
        (OLD_DRIVER, True, "cpu", logging.WARNING, "580 or newer"),
        (NO_DRIVER, True, "cpu", logging.INFO, "there is no NVIDIA driver"),
        (NO_DRIVER, False, "cpu", None, ""),
    ],
)
def test_auto_is_the_gpu_if_all_is_there(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    api: object,
    has_cuda: bool,
    device: str,
    level: int | None,
    told: str,
):
    """If only a part is there, the log says what is missing."""
    machine(monkeypatch, api, has_cuda=has_cuda)
    with caplog.at_level(logging.INFO):
        assert choose_device("auto") == device
    assert [(record.levelno, told in record.getMessage()) for record in caplog.records] == [
        (level, True)
    ] * bool(level)


@pytest.mark.parametrize(
    ("name", "api", "has_cuda", "told"),
    [
        ("cuda", FakeCuda(), False, "this onnxruntime has no CUDAExecutionProvider; " + REPAIR),
        (
            "cuda",
            NO_DRIVER,
            True,
            "there is no NVIDIA driver here: is the GPU visible to nvidia-smi",
        ),
        ("cuda", OLD_DRIVER, True, "update to a driver for CUDA 13, 580 or newer"),
        ("cuda", NO_GPU, True, "there is no GPU 0: no GPU is visible"),
        ("cuda:1", FakeCuda(), True, "there is no GPU 1: 1 GPU is visible"),
    ],
)
def test_cuda_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, api: object, has_cuda: bool, told: str
):
    machine(monkeypatch, api, has_cuda=has_cuda)
    with pytest.raises(PassError) as raised:
        choose_device(name)
    assert told in str(raised.value)


def test_both_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    """The last one that pip wrote has no CUDA."""
    machine(monkeypatch, FakeCuda(), has_cuda=False)
    monkeypatch.setattr(packages, "installed", lambda: dict.fromkeys(packages.PACKAGES, "1.31.1"))
    with pytest.raises(
        PassError,
        match="onnxruntime and onnxruntime-gpu are both installed, and share files; run: ",
    ):
        choose_device("cuda")


def test_an_environment_without_onnxruntime(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("pass_runtime.backends.ort")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        PassError, match=r"run: pip install 'pass-toolkit\[cpu\]', or for an NVIDIA GPU: "
    ):
        import pass_runtime.backends.ort.engine  # noqa: F401
    # as commands do
    with pytest.raises(PassError, match="onnxruntime is not installed"), importing():
        import onnxruntime  # noqa: F401
    with pytest.raises(ModuleNotFoundError), importing():
        import no_such_module  # noqa: F401
