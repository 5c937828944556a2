"""Sessions with engines on a fake GPU, compared with ONNX Runtime on the CPU."""

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

from pass_runtime import (
    GenerateOptions,
    LoadOptions,
    PassError,
    SamplingParams,
    Session,
    load,
)
from pass_runtime.backends.trt.backend import TrtBackend
from pass_runtime.backends.trt.library import LIBRARIES, LibraryName
from pass_runtime.bundle.manifest import TOKENIZER_FILE, Manifest
from pass_runtime.bundle.read import read_manifest
from pass_runtime.generation import TokenStream
from pass_runtime.measuring.lossless import first_difference, run_tokens

CAPACITY = 640
PROMPT = list(range(2, 40))
SAMPLINGS = [SamplingParams(seed=0), SamplingParams(0.9, seed=1), SamplingParams(0.9, 50, 0.9, 2)]
"""Greedy decoding, sampling, and truncated sampling."""
PromptAndOptions = tuple[Sequence[int], GenerateOptions]
"""A request: the token ids of its prompt, and its options."""


class Gpu:
    """A fake CUDA device, a bundle with engines, and the fake TensorRT that runs them."""

    def __init__(self, bundle: Path, monkeypatch: pytest.MonkeyPatch, **device: object) -> None:
        self.bundle, self.cuda = bundle, FakeCuda(**device)  # type: ignore[arg-type]
        self.manifest: Manifest = read_manifest(bundle)
        self.library = LIBRARIES[self.manifest.engines[0].library]
        self.trt = (FakeTensorRTX if self.library.compiles_kernels else FakeTensorRT)(self.cuda)
        monkeypatch.setitem(__import__("sys").modules, self.library.module, self.trt)

    def open(self, **options: int) -> Session:
        load_options = LoadOptions(self.library.name, **options)
        backend = TrtBackend.open(self.bundle, self.manifest, load_options, self.cuda)
        return Session(
            self.manifest, backend, Tokenizer.from_file(str(self.bundle / TOKENIZER_FILE))
        )

    def counts(self) -> tuple[int, ...]:
        """What does not grow in a session that is warm."""
        cuda = self.cuda
        return cuda.used, cuda.mallocs, cuda.captures, len(cuda.pinned), self.trt.contexts

    def assert_all_freed(self) -> None:
        cuda = self.cuda
        assert not cuda.allocations and not cuda.pinned and not cuda.streams and not cuda.graphs
        assert cuda.undestroyed == 0 and cuda.capturing is None


@pytest.fixture
def gpu(engine_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """`engine_bundle` is a fixture of the file that imports this."""
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
    """Copy the bundle and add engines, for windows of `least_width` rows or more."""
    copy = directory / "bundle"
    shutil.copytree(bundle, copy)
    add_fake_engines(copy, CAPACITY, least_width, max_batch_size, library)
    return copy


def run_prompt(
    session: Session,
    sampling: SamplingParams = SAMPLINGS[0],
    plan: str = "ar",
    count: int = 40,
    **options: object,
) -> TokenStream:
    request = GenerateOptions(count, sampling, plan=plan, ignore_eos=True, **options)  # type: ignore[arg-type]
    return run_tokens(session, PROMPT, request)


def submit_together(session: Session, requests: Sequence[PromptAndOptions]) -> list[TokenStream]:
    """Queue all requests before the first begins, so that they always share the same passes."""
    return session._worker.call(lambda: [session.generate_ids(*request) for request in requests])


def count_failures(
    session: Session,
    requests: Sequence[PromptAndOptions],
    expected: Sequence[Sequence[int]],
    message: str,
) -> int:
    failures = 0
    for stream, token_ids in zip(submit_together(session, requests), expected, strict=True):
        try:
            assert stream.result().token_ids == token_ids
        except PassError as error:
            assert message in str(error) and "\n" not in str(error)
            assert stream.finish_reason == "error"
            assert stream.token_ids == token_ids[: len(stream.token_ids)]
            failures += 1
    return failures


@cache
def cpu_session(bundle: Path) -> Session:
    return load(bundle, "cpu", threads=1)


def assert_cpu_writes(bundle: Path, request: PromptAndOptions, written: Sequence[int]) -> None:
    """Compare with plain decoding of the request alone, up to a near-tie."""
    prompt, options = request
    cpu = cpu_session(bundle)
    plain = replace(options, plan="ar", draft=None, lookahead=None, logprobs=None)
    expected = run_tokens(cpu, prompt, plain).token_ids
    difference = first_difference(cpu, prompt, plain, expected, written)
    assert difference is None or difference.is_near_tie, f"{options.plan}: {difference}"
