"""Makes ONNX Runtime on the CPU seem to capture CUDA graphs, as its CUDA provider does with
`enable_cuda_graph`, for the tests of sessions with `--device cuda`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from pass_runtime.backends.ort.session import open_session

RUNS_BEFORE_CAPTURE = 2
ORT = "pass_runtime.backends.ort"


class FakeCaptures:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: set[tuple[int, threading.Thread, int]] = set()
        self.refused: tuple[str, ...] = ()
        self.files: dict[int, str] = {}
        self.replays = self.eager = 0
        self._run = ort.InferenceSession.run_with_iobinding
        monkeypatch.setattr(
            ort.InferenceSession,
            "run_with_iobinding",
            lambda session, *arguments: self.run(session, *arguments),
        )
        for module in ("session", "backend"):
            monkeypatch.setattr(f"{ORT}.{module}.open_session", self.open)

    def open(self, path: Path, *arguments: Any, **options: Any) -> ort.InferenceSession:
        session = open_session(path, *arguments, **options)
        session.captures = True
        self.files[id(session)] = path.name
        return session

    def run(
        self, session: ort.InferenceSession, binding: ort.IOBinding, options: ort.RunOptions
    ) -> None:
        number = int(options.get_run_config_entry("gpu_graph_id"))
        if number == -1:
            self.eager += 1
            self._run(session, binding, options)
            return
        key = (id(session), threading.current_thread(), number)
        if key in self.captured:
            self.replays += 1
        else:
            for _ in range(RUNS_BEFORE_CAPTURE):
                self._run(session, binding, options)
            if any(name in self.files[id(session)] for name in self.refused):
                raise RuntimeError("CUDA failure 901: an operation failed during capture")
            self.captured.add(key)
        self._run(session, binding, options)

    @property
    def threads(self) -> set[threading.Thread]:
        return {thread for _, thread, _ in self.captured}
