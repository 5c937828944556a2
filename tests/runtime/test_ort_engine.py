"""Sessions on a device that may not be able to do what is asked for first."""

from __future__ import annotations

import gc
from pathlib import Path

import onnxruntime as ort
import psutil
import pytest

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.backends.ort.engine import PROVIDER_OPTIONS, open_session
from pass_runtime.bundle.head import FILE as HEAD_FILE
from pass_runtime.bundle.noise import TABLES_FILE
from pass_runtime.errors import PassError


class Cuda:
    """An InferenceSession on CUDA that refuses some of the settings."""

    def __init__(self, refused: int, provider: str = "CUDAExecutionProvider") -> None:
        self._refused, self._provider = refused, provider
        self.tried: list[dict[str, str]] = []

    def __call__(self, _path: Path, _options: ort.SessionOptions, providers: list) -> Cuda:
        self.tried.append(providers[0][1])
        if len(self.tried) <= self._refused:
            raise RuntimeError("cannot use\nthe graph capture feature")
        return self

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> Cuda:
        monkeypatch.setattr(ort, "InferenceSession", cuda)
        monkeypatch.setattr(ort, "preload_dlls", lambda: None)
        return cuda

    def get_providers(self) -> list[str]:
        return [self._provider]


@pytest.mark.parametrize("refused", [0, 1])
def test_a_graph_that_cannot_be_captured_runs_without(monkeypatch: pytest.MonkeyPatch, refused: int):
    cuda = Cuda.install(monkeypatch, Cuda(refused))
    assert open_session(Path("x"), "cuda") is cuda
    assert cuda.tried == list(PROVIDER_OPTIONS["cuda"])[: refused + 1]
    assert all(settings["use_tf32"] == "0" for settings in cuda.tried)


def test_what_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch):
    Cuda.install(monkeypatch, Cuda(2))
    with pytest.raises(PassError, match=r"cannot load x: cannot use the graph capture feature$"):
        open_session(Path("x"), "cuda")


def test_a_gpu_that_did_not_start_is_said(monkeypatch: pytest.MonkeyPatch):
    Cuda.install(monkeypatch, Cuda(0, "CPUExecutionProvider"))
    with pytest.raises(PassError, match=r"could not start CUDAExecutionProvider"):
        open_session(Path("x"), "cuda")


@pytest.mark.skipif(not psutil.LINUX, reason="reads what is mapped from /proc")
@pytest.mark.parametrize("name", [TABLES_FILE, HEAD_FILE])
def test_what_tails_share_is_mapped_once(head_bundle: Path, name: str):
    def mapped() -> int:
        return sum(name in place.path for place in psutil.Process().memory_maps(grouped=False))

    gc.collect()  # sessions of other tests
    before = mapped()
    with load(head_bundle, "cpu", threads=1) as session:
        for sampling in (SamplingParams(0.8, seed=1), SamplingParams(0.8, 50, 0.9, 1)):
            for plan in ("ar", "two-pass", "fused"):
                session.generate("fox", GenerateOptions(8, sampling, plan=plan, ignore_eos=True)).result()
        assert mapped() == before + 1
