from __future__ import annotations

import gc
from pathlib import Path

import onnxruntime as ort
import psutil
import pytest

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.backends.ort.session import PROVIDER_OPTIONS, open_session
from pass_runtime.bundle.head import HEAD_FILE
from pass_runtime.bundle.noise import TABLES_FILE
from pass_runtime.errors import PassError


class FakeSession:
    """Stands in for InferenceSession on CUDA, which refuses the first `refusals` settings that are
    tried."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        refusals: int,
        provider: str = "CUDAExecutionProvider",
    ) -> None:
        self._refusals, self._provider = refusals, provider
        self.tried_settings: list[dict[str, str]] = []
        monkeypatch.setattr(ort, "InferenceSession", self)
        monkeypatch.setattr(ort, "preload_dlls", lambda: None)

    def __call__(
        self, _graph: bytes, _options: ort.SessionOptions, providers: list, **_keywords: int
    ) -> FakeSession:
        self.tried_settings.append(providers[0][1])
        if len(self.tried_settings) <= self._refusals:
            raise RuntimeError("cannot use\nthe graph capture feature")
        return self

    def get_providers(self) -> list[str]:
        return [self._provider]


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    (tmp_path / "x.onnx").write_bytes(b"")
    return tmp_path / "x.onnx"


@pytest.mark.parametrize("refusals", [0, 1])
def test_a_graph_that_cannot_be_captured_runs_uncaptured(graph, monkeypatch, caplog, refusals):
    """ONNX Runtime's first error is the reason, which is logged and kept."""
    session = FakeSession(monkeypatch, refusals)
    assert open_session(graph, "cuda") is session
    reason = "cannot use the graph capture feature" if refusals else None
    assert session.not_captured == reason
    assert [line.split(": ")[1] for line in caplog.messages] == [reason] * refusals
    assert session.tried_settings == list(PROVIDER_OPTIONS["cuda"])[: refusals + 1]
    assert all(settings["use_tf32"] == "0" for settings in session.tried_settings)


def test_a_backend_lists_graphs_that_cannot_be_captured(tiny_bundle: Path, monkeypatch):
    """A trunk is listed from its opening on, a tail from its first use on."""

    def opened(path: Path, *arguments: object, **options: object) -> ort.InferenceSession:
        session = open_session(path, *arguments, **options)
        session.not_captured = f"no capture of {path.name}"
        return session

    for module in ("session", "backend"):
        monkeypatch.setattr(f"pass_runtime.backends.ort.{module}.open_session", opened)
    with load(tiny_bundle, "cpu") as session:
        (trunk,) = session.backend.uncaptured
        session.generate("The quick", GenerateOptions(max_new_tokens=2, plan="ar")).result()
        files = (trunk, "tail.ar.greedy.onnx")
        assert session.backend.uncaptured == {file: f"no capture of {file}" for file in files}


def test_a_file_that_cannot_be_loaded_is_an_error_of_one_line(graph: Path, monkeypatch):
    FakeSession(monkeypatch, 2)
    with pytest.raises(
        PassError, match=r"cannot load .*x.onnx: cannot use the graph capture feature$"
    ):
        open_session(graph, "cuda")


def test_too_little_memory_has_an_error_of_its_own(graph: Path, monkeypatch):
    def create(*_: object) -> None:
        raise RuntimeError("Exception during initialization: std::bad_alloc")

    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", create)
    message = r"^too little memory to load .*x.onnx: end other programs, or export .* int8 or int4$"
    with pytest.raises(PassError, match=message):
        open_session(graph, "cpu")


def test_an_error_of_cuda_opens_no_session_on_the_cpu(graph: Path, monkeypatch, capsys):
    """By default InferenceSession prints such an error and opens the file on the CPU."""
    opened = []

    def create(_session: ort.InferenceSession, providers: list, *_arguments: object) -> None:
        opened.append(providers[0][0])
        raise RuntimeError("CUDA failure 35: driver version is insufficient")

    monkeypatch.setattr(ort, "preload_dlls", lambda: None)
    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", create)
    fallback = ["CPUExecutionProvider"]
    monkeypatch.setattr(ort.InferenceSession, "_fallback_providers", fallback, raising=False)
    message = r"cannot load .*x.onnx: CUDA failure 35: driver version is insufficient$"
    with pytest.raises(PassError, match=message):
        open_session(graph, "cuda")
    assert opened == ["CUDAExecutionProvider"] * len(PROVIDER_OPTIONS["cuda"])
    assert capsys.readouterr().out == ""


def test_a_gpu_that_does_not_start_is_an_error(graph: Path, monkeypatch):
    FakeSession(monkeypatch, 0, "CPUExecutionProvider")
    with pytest.raises(PassError, match=r"could not start CUDAExecutionProvider"):
        open_session(graph, "cuda")


@pytest.mark.slow
@pytest.mark.skipif(not psutil.LINUX, reason="reads what is mapped from /proc")
@pytest.mark.parametrize("name", [TABLES_FILE, HEAD_FILE])
def test_tables_that_tails_share_are_mapped_once(head_bundle: Path, name: str):
    def count_mappings() -> int:
        regions = psutil.Process().memory_maps(grouped=False)
        return sum(name in region.path for region in regions)

    gc.collect()  # closes sessions of other tests
    before = count_mappings()
    with load(head_bundle, "cpu", threads=1) as session:
        for sampling in (SamplingParams(0.8, seed=1), SamplingParams(0.8, 50, 0.9, 1)):
            for plan in ("ar", "two-pass", "fused"):
                options = GenerateOptions(8, sampling, plan=plan, ignore_eos=True)
                session.generate("fox", options).result()
        assert count_mappings() == before + 1
