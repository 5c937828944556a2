from __future__ import annotations

import logging
import re
import sys
import tomllib
from pathlib import Path

import onnxruntime as ort
import pytest
from fake_cuda import FakeCuda, cuda_without_gpu

from pass_runtime import packages
from pass_runtime.backends.cuda import Cuda, import_api, why_no_device
from pass_runtime.backends.ort import session as ort_session
from pass_runtime.backends.ort.session import choose_device, open_memory
from pass_runtime.commands.errors import importing
from pass_runtime.errors import PassError

NO_DRIVER, OLD_DRIVER = cuda_without_gpu(0), cuda_without_gpu(12040)
NO_GPU = cuda_without_gpu(13040, (0, 0))
REPAIR = "run: pip uninstall --yes onnxruntime onnxruntime-gpu && pip install 'pass-toolkit[gpu]'"


def pretend(monkeypatch: pytest.MonkeyPatch, api: object, *, has_cuda: bool) -> None:
    """Pretend that `api` is CUDA on this machine, and that onnxruntime can use CUDA or not."""
    providers = [*(["CUDAExecutionProvider"] if has_cuda else []), "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: providers)
    monkeypatch.setattr("pass_runtime.backends.cuda.import_api", lambda: api)
    monkeypatch.setattr(ort_session, "import_api", lambda: api)


@pytest.mark.parametrize(
    ("api", "has_cuda", "device", "level", "logged"),
    [
        (FakeCuda(), True, "cuda", None, ""),
        (FakeCuda(), False, "cpu", logging.WARNING, REPAIR),
        (NO_GPU, True, "cpu", logging.WARNING, "not hidden by CUDA_VISIBLE_DEVICES"),
        (OLD_DRIVER, True, "cpu", logging.WARNING, "580 or newer"),
        (NO_DRIVER, True, "cpu", logging.INFO, "there is no NVIDIA driver"),
        (NO_DRIVER, False, "cpu", None, ""),
    ],
)
def test_auto_is_the_gpu_if_nothing_is_missing(
    monkeypatch,
    caplog,
    api: object,
    has_cuda: bool,
    device: str,
    level: int | None,
    logged: str,
):
    """If only a part is missing, a line of this level says which."""
    pretend(monkeypatch, api, has_cuda=has_cuda)
    with caplog.at_level(logging.INFO):
        assert choose_device("auto") == device
    lines = [(record.levelno, logged in record.getMessage()) for record in caplog.records]
    assert lines == ([(level, True)] if level else [])


@pytest.mark.parametrize(
    ("name", "api", "has_cuda", "message"),
    [
        ("cuda", FakeCuda(), False, "this onnxruntime has no CUDAExecutionProvider; " + REPAIR),
        ("cuda", NO_DRIVER, True, "no NVIDIA driver here: is the GPU visible to nvidia-smi"),
        ("cuda", OLD_DRIVER, True, "update to a driver for CUDA 13, 580 or newer"),
        ("cuda", NO_GPU, True, "there is no GPU 0: no GPU is visible"),
        ("cuda:1", FakeCuda(), True, "there is no GPU 1: 1 GPU is visible"),
    ],
)
def test_an_impossible_cuda_device_is_refused(
    monkeypatch, name: str, api: object, has_cuda: bool, message: str
):
    pretend(monkeypatch, api, has_cuda=has_cuda)
    with pytest.raises(PassError, match=re.escape(message)):
        choose_device(name)


def test_the_error_names_two_installed_packages_of_onnxruntime(monkeypatch):
    """They share files, and the package that pip wrote last has no CUDA."""
    pretend(monkeypatch, FakeCuda(), has_cuda=False)
    monkeypatch.setattr(packages, "installed", lambda: dict.fromkeys(packages.PACKAGES, "1.31.1"))
    message = "onnxruntime and onnxruntime-gpu are both installed, and share files; run: "
    with pytest.raises(PassError, match=message):
        choose_device("cuda")


def test_without_onnxruntime_the_error_names_the_command_that_installs_it(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pass_runtime.backends.ort")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    message = r"not installed; run: pip install 'pass-toolkit\[cpu\]', or for an NVIDIA GPU: "
    with pytest.raises(PassError, match=message), importing():  # as commands do
        import pass_runtime.backends.ort.session  # noqa: F401
    with pytest.raises(ModuleNotFoundError), importing():
        import no_such_module  # noqa: F401


def test_without_cuda_python_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    message = r"cannot be imported .*; run: pip install cuda-python$"
    for call in (import_api, lambda: open_memory("cuda")):
        with pytest.raises(PassError, match=message):
            call()


def test_the_error_names_an_old_driver_and_the_driver_that_is_needed():
    message = why_no_device(cuda_without_gpu(12040))
    assert "runs CUDA up to 12.4, and the library is CUDA 13.4" in message
    assert "a driver for CUDA 13, 580 or newer" in message
    assert "install" not in message.replace("installed", "")
    with_library_12 = cuda_without_gpu(11080, library_version=12090)
    assert "a driver for CUDA 12, 525 or newer" in why_no_device(with_library_12)
    message = r"cudaStreamCreateWithFlags .* up to 12\.4, .* 580 or newer"
    with pytest.raises(PassError, match=message):
        Cuda(cuda_without_gpu(12040))


def test_the_extra_gpu_installs_onnx_runtime_for_cuda_and_cuda_python():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    names = {re.split("[<>=]", requirement)[0] for requirement in extras["gpu"]}
    assert names == {"onnxruntime-gpu[cuda,cudnn]", "cuda-python"}
    assert set(extras["gpu"]) & set(extras["cuda"])  # the same versions of cuda-python
