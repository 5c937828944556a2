"""Sessions on engines of a fake device, compared with what the CPU writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from fake_cuda import FakeCuda
from fake_engines import add_fake_engines
from fake_tensorrt import FakeTensorRT, FakeTensorRTX
from tokenizers import Tokenizer

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load
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
    """A fake device, a bundle with engines for it, and the library that runs them."""

    def __init__(self, bundle: Path, monkeypatch: pytest.MonkeyPatch, **device: object) -> None:
        self.bundle, self.cuda = bundle, FakeCuda(**device)  # type: ignore[arg-type]
        self.manifest: Manifest = read_manifest(bundle)
        self.library = LIBRARIES[self.manifest.engines[0].library]
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

    def counts(self) -> tuple[int, ...]:
        """Memory, allocations, captures and contexts so far."""
        cuda = self.cuda
        return cuda.used, cuda.mallocs, cuda.captures, len(cuda.pinned), self.trt.contexts

    def assert_empty(self) -> None:
        """Everything on the device was freed."""
        cuda = self.cuda
        assert not cuda.allocations and not cuda.pinned and not cuda.streams and not cuda.graphs
        assert cuda.undestroyed == 0 and cuda.capturing is None


@pytest.fixture
def gpu(engine_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A device for the importing file's `engine_bundle`."""
    return Gpu(engine_bundle, monkeypatch)


@pytest.fixture
def session(gpu: Gpu) -> Iterator[Session]:
    with gpu.open() as session:
        yield session


def with_engines(
    bundle: Path,
    directory: Path,
    least_width: int = 1,
    max_batch_size: int = 1,
    library: LibraryName = "tensorrt",
) -> Path:
    """A copy of `bundle` in `directory`; its engines' windows have at least `least_width` rows."""
    copy = directory / "bundle"
    shutil.copytree(bundle, copy)
    add_fake_engines(copy, CAPACITY, least_width, max_batch_size, library)
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


def count_failures(
    session: Session, asked: Sequence[Asked], expected: Sequence[Sequence[int]], message: str
) -> int:
    """Run the requests together and return how many failed, with one line that holds `message`. The
    others wrote the expected tokens, and those that failed the first of them."""
    failed = 0
    for stream, right in zip(submit_together(session, asked), expected, strict=True):
        try:
            assert stream.result().token_ids == right
        except PassError as error:
            assert message in str(error) and "\n" not in str(error)
            assert stream.finish_reason == "error"
            assert stream.token_ids == right[: len(stream.token_ids)]
            failed += 1
    return failed


@cache
def cpu_session(bundle: Path) -> Session:
    return load(bundle, "cpu", threads=1)


def assert_cpu_writes(bundle: Path, asked: Asked, written: Sequence[int]) -> None:
    """Plain decoding of that request alone, on ONNX Runtime, writes the same but for near-ties."""
    prompt, options = asked
    cpu = cpu_session(bundle)
    plain = replace(options, plan="ar", draft=None, lookahead=None, logprobs=None)
    expected = run_tokens(cpu, prompt, plain).token_ids
    difference = first_difference(cpu, prompt, plain, expected, written)
    assert difference is None or difference.is_near_tie, f"{options.plan}: {difference}"
