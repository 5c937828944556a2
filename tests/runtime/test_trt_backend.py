from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import engine_sessions
import numpy as np
import pytest
from engine_sessions import (
    CAPACITY,
    PROMPT,
    SAMPLINGS,
    Gpu,
    assert_cpu_writes,
    assert_cpu_writes_all,
    cpu_session,
    run_prompt,
    with_engines,
)
from fake_cuda import cuda_without_gpu
from fake_tensorrt import FakeContext, FakeEngine, FakeTensorRT

from conftest import SilentProgress
from pass_exporter.config import EngineConfig
from pass_exporter.engines.compare import compare_engines
from pass_runtime import GenerateOptions, Session, load
from pass_runtime.backends.base import Batch
from pass_runtime.backends.cuda import find_device
from pass_runtime.backends.open import find_engine_library
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME, Manifest
from pass_runtime.bundle.plan import make_plan
from pass_runtime.bundle.sampling import SAMPLERS
from pass_runtime.bundle.window import ar_window
from pass_runtime.errors import PassError
from pass_runtime.measuring.lossless import first_difference, run_tokens

gpu, session = engine_sessions.gpu, engine_sessions.session


@pytest.fixture(scope="module", params=[1, 2], ids=["one row", "two rows"])
def engine_bundle(request, adapter_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(adapter_bundle, tmp_path_factory.mktemp("engines"), request.param)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sample", "truncated"])
def test_every_plan_writes_what_the_cpu_writes(session, engine_bundle, sampling):
    expected = run_prompt(cpu_session(engine_bundle), sampling).token_ids
    for plan in ("ar", "two-pass", "fused", "auto"):
        assert run_prompt(session, sampling, plan).token_ids == expected, plan
    for draft in ("ngram", "both"):
        assert run_prompt(session, sampling, "fused", draft=draft).token_ids == expected, draft


def test_a_bundle_without_an_adapter(random_bundle: Path, tmp_path: Path, monkeypatch):
    bundle = with_engines(random_bundle, tmp_path, 2)
    with Gpu(bundle, monkeypatch).open() as session:
        expected = run_prompt(cpu_session(bundle), SAMPLINGS[1]).token_ids
        for plan in ("ar", "two-pass", "fused"):
            assert run_prompt(session, SAMPLINGS[1], plan).token_ids == expected, plan


@pytest.mark.parametrize("plan", ["ar", "two-pass", "fused"])
def test_log_probabilities_are_those_of_the_cpu(session: Session, engine_bundle: Path, plan: str):
    options = GenerateOptions(
        20, SAMPLINGS[1], plan=plan, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    expected = cpu_session(engine_bundle).generate(PROMPT, options).result()
    for _ in range(2):  # the second time from captured graphs
        written = session.generate(PROMPT, options).result()
        assert written.token_ids == expected.token_ids
        assert written.prompt_logprobs[0] is None
        values, at_cpu = (
            [*each.prompt_logprobs[1:], *(token.logprobs for token in each.tokens)]
            for each in (written, expected)
        )
        assert len(values) == len(PROMPT) - 1 + 20
        for value, there in zip(values, at_cpu, strict=True):
            assert value.logprob == pytest.approx(there.logprob, abs=1e-3)
            assert dict(value.top) == pytest.approx(dict(there.top), abs=1e-3)


def test_every_kind_of_pass_is_captured_once(session: Session, gpu: Gpu):
    backend = session.backend
    backend.resize(512, [0])
    backend.set_sampling(0, SAMPLINGS[2])

    def run_five_times(work) -> tuple[int, int]:
        """Return how many captures and launches five runs make."""
        before = gpu.cuda.captures, gpu.cuda.launches
        for _ in range(5):
            work()
        return gpu.cuda.captures - before[0], gpu.cuda.launches - before[1]

    first_runs, later_runs = (1, 3), (0, 5)
    kinds = [
        Batch(ar_window(), 1, sampler, logprobs=logprobs)
        for sampler, logprobs in product(SAMPLERS, (None, "raw"))
    ]
    kinds += [Batch(window, 1, "greedy") for window in make_plan("two-pass", 8).windows]
    for kind in kinds:
        backend.stage(0, kind.window, 5, 7)
        assert run_five_times(lambda kind=kind: backend.run(kind)) == first_runs, kind
        assert run_five_times(lambda kind=kind: backend.run(kind)) == later_runs, kind
    assert run_five_times(lambda: backend.run_trunk(ar_window(), 1)) == first_runs
    assert run_five_times(lambda: backend.prefill(0, 0, [5, 6], 32)) == first_runs
    for sampling in SAMPLINGS:
        backend.set_sampling(0, sampling)
        assert run_five_times(lambda: backend.run_trunk(ar_window(), 1)) == later_runs
        assert run_five_times(lambda: backend.prefill(0, 2, [5, 6, 7], 32)) == later_runs
    backend.resize(CAPACITY, [0])
    assert run_five_times(lambda: backend.run(kinds[0])) == first_runs


def test_shapes_that_are_bound_already_are_not_set_again(session: Session, gpu: Gpu):
    backend = session.backend
    backend.resize(512, [0])
    backend.set_sampling(0, SAMPLINGS[0])
    backend.stage(0, ar_window(), 5, 7)
    backend.run_trunk(ar_window(), 1)
    before = gpu.trt.shapes_set
    backend.run(Batch(ar_window(), 1, "greedy"))  # another program, which runs the same trunk
    tail = session.manifest.window("ar").tails["greedy"]
    assert gpu.trt.shapes_set - before == len(tail.inputs)


@pytest.mark.parametrize("capacity", [CAPACITY, 600, 200])
def test_a_text_ends_at_a_capacity_that_is_smaller_than_the_engines(gpu: Gpu, capacity: int):
    prompt = [2 + i % 300 for i in range(60)]
    options = GenerateOptions(1000, SAMPLINGS[1], plan="two-pass", ignore_eos=True)
    with gpu.open(capacity=capacity) as session:
        stream = run_tokens(session, prompt, options)
        padding = session.backend.capabilities.least_width - 1
        assert stream.finish_reason == "length"
        assert len(prompt) + len(stream.token_ids) == capacity + 1 - padding
        request = (prompt, replace(options, max_new_tokens=40))
        assert_cpu_writes(gpu.bundle, request, stream.token_ids[:40])


def test_a_larger_capacity_reads_more_columns_of_the_same_cache(session, gpu, engine_bundle):
    long = [2 + i % 300 for i in range(480)]
    options = GenerateOptions(100, plan="fused", ignore_eos=True)
    expected = run_tokens(cpu_session(engine_bundle), long, options).token_ids
    run_prompt(session, plan="fused")
    used = gpu.cuda.used
    assert run_tokens(session, long, options).token_ids == expected
    assert session.backend.capacity == CAPACITY
    # Windows of other plans and the input `columns` take memory, but less than another cache: keys
    # and values of 2 layers and 2 heads, of 16 floats for each entry.
    assert gpu.cuda.used - used < 2 * (2 * 2 * CAPACITY * 16 * 4)


@pytest.mark.parametrize("options", [{"plan": "fused:2,1,1"}, {"plan": "two-pass", "lookahead": 3}])
def test_plans_without_engines_are_refused_before_anything_runs(session: Session, options):
    message = "only look-ahead 8 without group sizes; use --plan fused, --lookahead 8 or 0"
    with pytest.raises(PassError, match=message):
        run_prompt(session, **options)
    assert run_prompt(session, plan="fused", lookahead=0).stats.tau == 1


def with_changed_engines(manifest: Manifest, **changes: object) -> Manifest:
    engines = (manifest.engines[0].model_copy(update=changes),)
    return manifest.model_copy(update={"engines": engines})


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"capacity": 644}, {}, "tokens; use --capacity 640 or less, .*-len 644$"),
        ({"max_batch_size": 2}, {}, "-size 1; use that, or build them with --max-batch-size 2$"),
        (
            {},
            {"version": "10.1"},
            r"version 10\.1, and 10\.15\.1\.fake is installed; run: pass-export",
        ),
        ({}, {"targets": ("sm89",)}, r"are for sm89, and this GPU \(Fake GPU\) is sm90"),
        ({}, {"bundle": "0" * 64}, "built from other graphs"),
        ({}, {"library": "tensorrt-rtx"}, "has no tensorrt engines; run: pass-export build"),
    ],
)
def test_engines_that_do_not_fit_are_refused_before_anything_is_allocated(
    gpu: Gpu, options: dict[str, int], changes: dict[str, object], message: str
):
    gpu.manifest = with_changed_engines(gpu.manifest, **changes)
    with pytest.raises(PassError, match=message) as refused:
        gpu.open(**options)
    assert "\n" not in str(refused.value)
    assert gpu.cuda.mallocs == 0 and not gpu.cuda.streams


@pytest.mark.parametrize("damage", ["missing", "short", "other"])
def test_damaged_engines_are_refused_before_anything_is_allocated(
    gpu: Gpu, tmp_path: Path, damage: str, monkeypatch
):
    bundle = tmp_path / "bundle"
    shutil.copytree(gpu.bundle, bundle)
    path = gpu.manifest.engines[0].path(bundle) / gpu.manifest.engines[0].engines[-1].file
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(data[:-1] + (b"" if damage == "short" else b" "))
    broken = Gpu(bundle, monkeypatch)
    with pytest.raises(PassError, match=r"is missing|is not the file that was built"):
        broken.open()
    assert broken.cuda.mallocs == 0


def change_engines(monkeypatch: pytest.MonkeyPatch, change: Callable[[FakeEngine], object]) -> None:
    """Make every engine that is loaded differ from its file."""
    init = FakeEngine.__init__

    def init_changed(self: FakeEngine, library: FakeTensorRT, plan: dict) -> None:
        init(self, library, plan)
        change(self)
        self.tensors = self.inputs | self.outputs
        self.num_io_tensors = len(self.tensors)

    monkeypatch.setattr(FakeEngine, "__init__", init_changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda engine: engine.plan["aliases"].clear(), "does not update its KV cache in place"),
        (lambda engine: engine.__dict__.update(num_optimization_profiles=0), "the manifest lists"),
    ],
    ids=["aliases", "profiles"],
)
def test_an_engine_that_differs_from_the_manifest_is_refused(gpu, change, message, monkeypatch):
    change_engines(monkeypatch, change)
    with pytest.raises(PassError, match=message):
        gpu.open()


@pytest.mark.parametrize(
    ("side", "name", "axis", "size"),
    [
        ("inputs", "past_key.0", 1, 7),  # heads
        ("outputs", "present_value.0", 2, CAPACITY + 64),
        ("outputs", "logits", 2, 7),  # the vocabulary
        ("inputs", "row_position", 1, 1),  # of another rank
        ("inputs", "lookahead_rows", None, 0),
        ("inputs", "columns", None, 0),
        ("outputs", "no_tensor_of_the_bundle", 0, 1),
    ],
)
def test_an_engine_with_another_tensor_than_the_manifest_is_refused(
    gpu: Gpu, side, name, axis, size, monkeypatch
):
    """The tensor's `axis` has another size, or the tensor is missing if axis is None."""

    def built_from_another_export(engine: FakeEngine) -> None:
        tensors = getattr(engine, side)
        tensor = tensors.pop(name, SimpleNamespace(shape=[]))
        if axis is not None:
            shape = [*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]]
            tensors[name] = SimpleNamespace(shape=shape)

    change_engines(monkeypatch, built_from_another_export)
    difference = rf"trunk.* and the manifest differ in the shape of {name}: .+ and .+"
    with pytest.raises(PassError, match=rf"{difference}; build it again with pass-export build$"):
        gpu.open()
    gpu.assert_all_freed()


@pytest.mark.parametrize(("version", "level"), [(12040, "WARNING"), (0, "INFO")])
def test_auto_logs_why_engines_are_not_used(gpu, monkeypatch, caplog, version, level):
    """With a driver, even an old one, it is a warning, because somebody wants to use the GPU."""
    monkeypatch.setattr("pass_runtime.backends.cuda.import_api", lambda: cuda_without_gpu(version))
    caplog.set_level("INFO", "pass_runtime.device")
    assert find_engine_library(gpu.manifest) is None
    (record,) = [each for each in caplog.records if "engines are not used" in each.message]
    assert record.levelname == level and "CUDA error 35" in record.message
    assert ("up to 12.4" in record.message) == bool(version)


def test_auto_takes_engines_only_where_they_fit(gpu: Gpu, monkeypatch):
    if find_device() is not None:
        pytest.skip("there is a GPU")
    assert load(gpu.bundle, "auto", threads=1).backend.capabilities.device in ("cpu", "cuda")
    with pytest.raises(PassError, match=r"needs an NVIDIA GPU|CUDA"):
        load(gpu.bundle, "tensorrt")
    monkeypatch.setattr("pass_runtime.backends.open.find_device", lambda: find_device(gpu.cuda))
    assert find_engine_library(gpu.manifest) is LIBRARIES["tensorrt"]
    assert find_engine_library(with_changed_engines(gpu.manifest, targets=("sm75",))) is None


@pytest.mark.gpu
@pytest.mark.parametrize("library", LIBRARIES)
def test_real_engines_write_what_the_cpu_writes(adapter_bundle: Path, tmp_path: Path, library: str):
    """Builds for the GPU at hand and repeats the checks above on it."""
    from pass_exporter.engines.build import build_engines

    pytest.importorskip(LIBRARIES[library].module)
    device, targets = find_device(), LIBRARIES[library].targets
    if device is None or (targets and device.target not in targets):
        pytest.skip(f"no GPU that {library} builds for")
    bundle = tmp_path / "bundle"
    shutil.copytree(adapter_bundle, bundle)
    config = EngineConfig(library, capacity=CAPACITY, max_batch_size=4)
    build_engines(bundle, config, SilentProgress())
    cpu = load(bundle, "cpu")
    with load(bundle, library) as session:
        for sampling in SAMPLINGS:
            expected = run_prompt(cpu, sampling).token_ids
            for plan in ("ar", "two-pass", "fused", "auto"):
                options = GenerateOptions(40, sampling, plan=plan, ignore_eos=True)
                written = run_tokens(session, PROMPT, options).token_ids
                difference = first_difference(cpu, PROMPT, options, expected, written)
                assert difference is None or difference.is_near_tie, f"{plan}: {difference}"
    with load(bundle, library, max_batch_size=4) as session:
        requests = []
        for i, plan in enumerate(("ar", "two-pass", "fused", "auto", "two-pass", "ar")):
            options = GenerateOptions(20 + 7 * i, SAMPLINGS[i % 3], plan=plan, ignore_eos=True)
            requests.append(([2 + i, *PROMPT[i:]], options))
        assert_cpu_writes_all(session, bundle, requests)
    with load(bundle, library) as session:
        run_prompt(session, count=4)
        free_bytes = find_device().free
        for _ in range(1000):
            run_prompt(session, count=4)
        assert abs(find_device().free - free_bytes) < 1 << 20
    assert (bundle / FILE_NAME).is_file()


def test_engines_are_compared_with_onnx_runtime(gpu: Gpu, monkeypatch):
    monkeypatch.setattr("pass_runtime.backends.cuda.import_api", lambda: gpu.cuda)
    comparisons = compare_engines(gpu.bundle, "tensorrt")
    plans = [comparison.window for comparison in comparisons]
    assert plans == ["ar", "draft-8", "verify-8", "fused-8", "copy-16"]
    assert all(comparison.relative < 1e-5 for comparison in comparisons)
    assert not gpu.cuda.allocations
    run = FakeContext._run

    def run_inexactly(self, shapes, addresses):
        run(self, shapes, addresses)
        if "columns" in shapes:  # the trunk
            logits = self._view("logits", (1, shapes["logit_rows"][0], 320), addresses)
            logits[..., 7] += np.float32(0.01) * np.abs(logits).max()

    monkeypatch.setattr(FakeContext, "_run", run_inexactly)
    message = r"logits differ from ONNX Runtime's .* in window ar; .*Reducing a failing graph"
    with pytest.raises(PassError, match=message):
        compare_engines(gpu.bundle, "tensorrt")
