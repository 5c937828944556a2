"""Sessions with engines on a fake GPU, compared with ONNX Runtime on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import onnx
import pytest
from fake_cuda import FakeCuda
from fake_tensorrt import VERSION, FakeTensorRT, FakeTensorRTX
from faulty import session_of

from pass_exporter.engines.build import graph_sources
from pass_exporter.engines.builder import Source
from pass_exporter.engines.profiles import column_steps, default_prefill_widths
from pass_runtime import (
    GenerateOptions,
    LoadOptions,
    PassError,
    SamplingParams,
    Session,
    load,
)
from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.trt.backend import TrtBackend
from pass_runtime.backends.trt.library import LIBRARIES, LibraryName
from pass_runtime.bundle.integrity import file_info
from pass_runtime.bundle.manifest import FILE_NAME, EngineFile, EngineSet, Manifest
from pass_runtime.bundle.read import read_manifest
from pass_runtime.generation import TokenStream
from pass_runtime.measuring.lossless import first_difference, run_tokens

CAPACITY = 640
PROMPT = list(range(2, 40))
SAMPLINGS = [SamplingParams(seed=0), SamplingParams(0.9, seed=1), SamplingParams(0.9, 50, 0.9, 2)]
PromptAndOptions = tuple[Sequence[int], GenerateOptions]


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
        backend = TrtBackend(self.bundle, self.manifest, load_options, self.cuda)
        return session_of(backend)

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


def ort_session_on(device: FakeCuda, bundle: Path) -> Session:
    """ONNX Runtime runs on the CPU, in the memory of the fake device."""
    options = {"threads": 1, "max_batch_size": 2, "memory": Cuda(device)}
    return session_of(OrtBackend(bundle, read_manifest(bundle), "cpu", **options))


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


def add_fake_engines(
    bundle: Path,
    capacity: int,
    least_width: int = 1,
    max_batch_size: int = 1,
    library: LibraryName = "tensorrt",
) -> Manifest:
    """From the graphs that the exporter would give to TensorRT."""
    manifest = read_manifest(bundle)
    columns = column_steps(capacity)
    engines = EngineSet(
        directory="fake",
        library=library,
        version=VERSION,
        targets=("sm90",),
        bundle=manifest.content_hash,
        lookahead=manifest.lookahead.length,
        max_batch_size=max_batch_size,
        capacities=columns,
        prefill_widths=default_prefill_widths(manifest, columns),
        engines=(),
    )
    directory = engines.path(bundle)
    directory.mkdir(parents=True)
    sources = graph_sources(bundle, manifest, columns, max_batch_size, least_width)
    files = tuple(_write_plan(bundle, directory, source) for source in sources)
    manifest = manifest.model_copy(
        update={"engines": (engines.model_copy(update={"engines": files}),)}
    )
    (bundle / FILE_NAME).write_text(manifest.text(), encoding="utf-8")
    return manifest


def _described(values: Sequence[onnx.ValueInfoProto]) -> dict[str, dict]:
    """For the fake in C++."""
    return {
        value.name: {
            "dtype": onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name,
            "shape": [
                size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim
            ],
        }
        for value in values
    }


def _write_plan(bundle: Path, directory: Path, source: Source) -> EngineFile:
    path = bundle / f".{source.graph.file}"  # in this folder, where it finds its external data
    path.write_bytes(source.model)
    model = onnx.load_from_string(source.model)
    plan = {
        "onnx": str(path),
        "profiles": [profile.sizes for profile in source.profiles],
        "aliases": source.aliases,
        "inputs": _described(model.graph.input),
        "outputs": _described(model.graph.output),
    }
    engine = directory / f"{source.graph.file}.engine"
    engine.write_text(json.dumps(plan), encoding="utf-8")
    info = file_info(engine)
    return EngineFile(
        graph=source.graph.file,
        file=engine.name,
        sha256=info.sha256,
        bytes=info.bytes,
        profiles=source.profiles,
        aliases=source.aliases,
    )


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


def assert_cpu_writes_all(
    session: Session, bundle: Path, requests: Sequence[PromptAndOptions]
) -> None:
    """The same for a batch that `session` decodes."""
    for request, stream in zip(requests, submit_together(session, requests), strict=True):
        assert_cpu_writes(bundle, request, stream.result().token_ids)
