"""ONNX Runtime's sessions on a device that may refuse settings or not start."""

from __future__ import annotations

import gc
from pathlib import Path

import onnxruntime as ort
import psutil
import pytest

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.backends.ort.engine import PROVIDER_OPTIONS, open_session
from pass_runtime.bundle.head import HEAD_FILE
from pass_runtime.bundle.noise import TABLES_FILE
from pass_runtime.errors import PassError


class Cuda:
    """An InferenceSession on CUDA that refuses some of the settings."""

    def __init__(self, refused: int, provider: str = "CUDAExecutionProvider") -> None:
        self._refused, self._provider = refused, provider
        self.tried: list[dict[str, str]] = []

    def __call__(
        self, _path: Path, _options: ort.SessionOptions, providers: list, **_keywords: int
    ) -> Cuda:
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
def test_a_graph_that_cannot_be_captured_runs_without(monkeypatch, caplog, refused: int):
    """ONNX Runtime's first error is the reason, which is logged and kept."""
    cuda = Cuda.install(monkeypatch, Cuda(refused))
    assert open_session(Path("x"), "cuda") is cuda
    reasons = ["cannot use the graph capture feature"][:refused]
    assert cuda.not_captured == next(iter(reasons), None)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == reasons
    assert cuda.tried == list(PROVIDER_OPTIONS["cuda"])[: refused + 1]
    assert all(settings["use_tf32"] == "0" for settings in cuda.tried)


def test_a_backend_lists_graphs_that_cannot_be_captured(tiny_bundle: Path, monkeypatch):
    """The trunk when it is opened, a tail when it is first used."""

    def opened(path: Path, *arguments: object, **options: object) -> ort.InferenceSession:
        session = open_session(path, *arguments, **options)
        session.not_captured = f"no capture of {path.name}"
        return session

    for module in ("trunks", "backend"):
        monkeypatch.setattr(f"pass_runtime.backends.ort.{module}.open_session", opened)
    with load(tiny_bundle, "cpu", weight_cache=False) as session:
        (trunk,) = session.backend.uncaptured
        session.generate("The quick", GenerateOptions(max_new_tokens=2, plan="ar")).result()
        found = session.backend.uncaptured
        assert found == {file: f"no capture of {file}" for file in (trunk, "tail.ar.greedy.onnx")}


def test_a_file_that_cannot_be_loaded_is_an_error_of_one_line(monkeypatch):
    Cuda.install(monkeypatch, Cuda(2))
    with pytest.raises(PassError, match=r"cannot load x: cannot use the graph capture feature$"):
        open_session(Path("x"), "cuda")


def test_too_little_memory_has_an_error_of_its_own(monkeypatch):
    def create(*_: object) -> None:
        raise RuntimeError("Exception during initialization: std::bad_alloc")

    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", create)
    message = r"^too little memory to load x: end other programs, or export .* w8a8 or int4$"
    with pytest.raises(PassError, match=message):
        open_session(Path("x"), "cpu")


def test_an_error_of_cuda_opens_no_session_on_the_cpu(monkeypatch, capsys):
    """By default InferenceSession prints such an error and opens the file on the CPU."""
    opened = []

    def create(_session: ort.InferenceSession, providers: list, *_arguments: object) -> None:
        opened.append(providers[0][0])
        raise RuntimeError("CUDA failure 35: driver version is insufficient")

    monkeypatch.setattr(ort, "preload_dlls", lambda: None)
    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", create)
    fallback = ["CPUExecutionProvider"]
    monkeypatch.setattr(ort.InferenceSession, "_fallback_providers", fallback, raising=False)
    message = r"cannot load x: CUDA failure 35: driver version is insufficient$"
    with pytest.raises(PassError, match=message):
        open_session(Path("x"), "cuda")
    assert opened == ["CUDAExecutionProvider"] * 2
    assert capsys.readouterr().out == ""


def test_a_gpu_that_does_not_start_is_an_error(monkeypatch):
    Cuda.install(monkeypatch, Cuda(0, "CPUExecutionProvider"))
    with pytest.raises(PassError, match=r"could not start CUDAExecutionProvider"):
        open_session(Path("x"), "cuda")


@pytest.mark.slow
@pytest.mark.skipif(not psutil.LINUX, reason="reads what is mapped from /proc")
@pytest.mark.parametrize("name", [TABLES_FILE, HEAD_FILE])
def test_tables_that_tails_share_are_mapped_once(head_bundle: Path, name: str):
    def mapped() -> int:
        return sum(name in place.path for place in psutil.Process().memory_maps(grouped=False))

    gc.collect()  # sessions of other tests
    before = mapped()
    with load(head_bundle, "cpu", threads=1) as session:
        for sampling in (SamplingParams(0.8, seed=1), SamplingParams(0.8, 50, 0.9, 1)):
            for plan in ("ar", "two-pass", "fused"):
                options = GenerateOptions(8, sampling, plan=plan, ignore_eos=True)
                session.generate("fox", options).result()
        assert mapped() == before + 1
