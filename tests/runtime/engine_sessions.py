"""Sessions on engines of a fake device, and what the CPU writes in their place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from fake_gpu import FakeCuda, FakeTensorRT, FakeTensorRTX, add_fake_engines
from tokenizers import Tokenizer

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.backends.trt.backend import TrtBackend
from pass_runtime.backends.trt.library import LIBRARIES, LibraryName
from pass_runtime.bundle.manifest import TOKENIZER_FILE, Manifest
from pass_runtime.bundle.read import read_manifest
from pass_runtime.generation import TokenStream
from pass_runtime.measuring.lossless import first_difference, run_tokens

CAPACITY = 640
PROMPT = list(range(2, 40))
SAMPLINGS = [SamplingParams(seed=0), SamplingParams(0.9, seed=1), SamplingParams(0.9, 50, 0.9, 2)]
Asked = tuple[Sequence[int], GenerateOptions]


class Gpu:
    """A fake device, its library, and a bundle with engines for it."""

    def __init__(
        self,
        bundle: Path,
        monkeypatch: pytest.MonkeyPatch,
        library: LibraryName = "tensorrt",
        **device: object,
    ) -> None:
        self.bundle, self.cuda = bundle, FakeCuda(**device)  # type: ignore[arg-type]
        self.manifest: Manifest = read_manifest(bundle)
        self.library = LIBRARIES[library]
        self.trt = (FakeTensorRTX if self.library.compiles_kernels else FakeTensorRT)(self.cuda)
        monkeypatch.setitem(__import__("sys").modules, self.library.module, self.trt)

    def open(self, **options: int) -> Session:
        """options: max_batch_size, capacity."""
        backend = TrtBackend.open(
            self.bundle, self.manifest, self.library, api=self.cuda, **options
        )
        return Session(
            self.manifest, backend, Tokenizer.from_file(str(self.bundle / TOKENIZER_FILE))
        )

    def assert_empty(self) -> None:
        cuda = self.cuda
        assert not cuda.blocks and not cuda.pinned and not cuda.streams and not cuda.graphs
        assert cuda.undestroyed == 0 and cuda.capturing is None


@pytest.fixture
def gpu(engine_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Of the importing file's `engine_bundle`."""
    return Gpu(engine_bundle, monkeypatch)


@pytest.fixture
def session(gpu: Gpu) -> Iterator[Session]:
    with gpu.open() as session:
        yield session


def with_engines(
    bundle: Path, directory: Path, least_width: int = 1, max_batch_size: int = 1
) -> Path:
    """A copy of `bundle` in `directory`; its engines' windows have at least `least_width` rows."""
    copy = directory / "bundle"
    shutil.copytree(bundle, copy)
    add_fake_engines(copy, CAPACITY, least_width, max_batch_size)
    return copy


def tokens(
    session: Session,
    sampling: SamplingParams = SAMPLINGS[0],
    plan: str = "ar",
    count: int = 40,
    **options: object,
) -> TokenStream:
    request = GenerateOptions(count, sampling, plan=plan, ignore_eos=True, **options)  # type: ignore[arg-type]
    return run_tokens(session, PROMPT, request)


def submit_together(session: Session, asked: Sequence[Asked]) -> list[TokenStream]:
    """Queue all requests before the first begins, so that they always share the same passes."""
    return session._worker.call(lambda: [session.generate_ids(*one) for one in asked])


@cache
def cpu_session(bundle: Path) -> Session:
    return load(bundle, "cpu", threads=1)


def assert_cpu_writes(bundle: Path, asked: Asked, written: Sequence[int]) -> None:
    """Plain decoding of that request alone, on ONNX Runtime, but for near-ties."""
    prompt, options = asked
    cpu = cpu_session(bundle)
    plain = replace(options, plan="ar", draft=None, lookahead=None, logprobs=None)
    expected = run_tokens(cpu, prompt, plain).token_ids
    difference = first_difference(cpu, prompt, plain, expected, written)
    assert difference is None or difference.is_near_tie, f"{options.plan}: {difference}"
