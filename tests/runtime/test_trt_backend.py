from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import engine_sessions
import numpy as np
import pytest
from engine_sessions import (
    CAPACITY,
    PROMPT,
    SAMPLINGS,
    Gpu,
    assert_cpu_writes,
    cpu_session,
    run_prompt,
    submit_together,
    with_engines,
)
from fake_cuda import cuda_without_gpu
from fake_tensorrt import FakeContext, FakeEngine, FakeTensorRT

from conftest import SilentProgress
from pass_exporter.config import EngineConfig
from pass_exporter.engines.compare import compare_engines
from pass_runtime import GenerateOptions, SamplingParams, Session, load
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
def test_every_plan_writes_what_the_cpu_writes(
    session: Session, engine_bundle: Path, sampling: SamplingParams
):
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


def test_log_probabilities_of_a_prompt_are_those_of_the_cpu(session: Session, engine_bundle: Path):
    options = GenerateOptions(3, plan="ar", prompt_logprobs=2, ignore_eos=True)
    expected = cpu_session(engine_bundle).generate(PROMPT, options).result()
    for _ in range(2):  # the second time from captured graphs
        generation = session.generate(PROMPT, options).result()
        assert generation.token_ids == expected.token_ids
        values, at_cpu = generation.prompt_logprobs, expected.prompt_logprobs
        assert len(values) == len(PROMPT) and values[0] is None
        for value, there in zip(values[1:], at_cpu[1:], strict=True):
            assert value.logprob == pytest.approx(there.logprob, abs=1e-3)
            assert dict(value.top) == pytest.approx(dict(there.top), abs=1e-3)


def test_a_plan_is_captured_once_and_replayed(session: Session, gpu: Gpu):
    run_prompt(session, plan="two-pass")
    counts, launches = gpu.counts(), gpu.cuda.launches
    passes = run_prompt(session, plan="two-pass").stats.passes
    assert gpu.cuda.captures == 3  # a draft, a verify and a prefill pass
    assert gpu.cuda.launches - launches >= passes
    assert gpu.counts() == counts


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


def test_logprobs_are_those_of_the_cpu(session: Session, engine_bundle: Path):
    for plan in ("ar", "two-pass", "fused"):
        on_engines, on_cpu = (
            run_prompt(each, SAMPLINGS[1], plan, logprobs=3)
            for each in (session, cpu_session(engine_bundle))
        )
        assert on_engines.token_ids == on_cpu.token_ids
        for token, expected in zip(on_engines.tokens, on_cpu.tokens, strict=True):
            assert token.logprobs is not None and expected.logprobs is not None
            assert token.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-3)
            top, expected_top = (each.logprobs.top for each in (token, expected))
            assert [id for id, _ in top] == [id for id, _ in expected_top]


@pytest.mark.parametrize("capacity", [CAPACITY, 600, 512, 200, 100])
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 644}, "KV capacity is 640 tokens; use --capacity 640 or less, .*-len 644$"),
        (
            {"max_batch_size": 2},
            r"built with --max-batch-size 1; use that, or build them with --max-batch-size 2$",
        ),
    ],
)
def test_more_than_the_engines_were_built_for_is_refused(
    gpu: Gpu, options: dict[str, int], message: str
):
    with pytest.raises(PassError, match=message) as refused:
        gpu.open(**options)
    assert "\n" not in str(refused.value)
    assert gpu.cuda.mallocs == 0 and not gpu.cuda.streams


def test_a_larger_capacity_reads_more_columns_of_the_same_cache(
    session: Session, gpu: Gpu, engine_bundle: Path
):
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
    ("changes", "message"),
    [
        (
            {"version": "10.14.0"},
            r"built by version 10\.14\.0, and 10\.15\.1\.fake is installed; run: pass-export build",
        ),
        ({"targets": ("sm89", "sm120")}, r"are for sm89, sm120, and this GPU \(Fake GPU\) is sm90"),
        ({"bundle": "0" * 64}, r"built from other graphs"),
        ({"library": "tensorrt-rtx"}, r"has no tensorrt engines; run: pass-export build"),
    ],
    ids=["version", "target", "content", "library"],
)
def test_engines_that_do_not_fit_are_refused_before_anything_is_allocated(
    gpu: Gpu, changes, message
):
    gpu.manifest = with_changed_engines(gpu.manifest, **changes)
    with pytest.raises(PassError, match=message):
        gpu.open()
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


def change_engines(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict], dict]) -> None:
    """Make every engine that is loaded differ from its file: `change` makes of the fake engine's
    description the keys that are replaced."""
    init = FakeEngine.__init__

    def init_changed(self: FakeEngine, library: FakeTensorRT, plan: dict) -> None:
        init(self, library, plan | change(plan))

    monkeypatch.setattr(FakeEngine, "__init__", init_changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aliases": {}}, "does not update its KV cache in place"),
        ({"profiles": []}, "profiles and the manifest lists"),
    ],
    ids=["aliases", "profiles"],
)
def test_an_engine_that_differs_from_the_manifest_is_refused(
    gpu: Gpu, changes: dict, message: str, monkeypatch
):
    change_engines(monkeypatch, lambda _: changes)
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

    def built_from_another_export(plan: dict) -> dict:
        tensors = dict(plan[side])
        shape = list(tensors.pop(name, {"shape": []})["shape"])
        if axis is not None:
            tensors[name] = {"dtype": "float32", "shape": [*shape[:axis], size, *shape[axis + 1 :]]}
        return {side: tensors}

    change_engines(monkeypatch, built_from_another_export)
    difference = rf"trunk.* and the manifest differ in the shape of {name}: .+ and .+"
    with pytest.raises(PassError, match=rf"{difference}; build it again with pass-export build$"):
        gpu.open()
    gpu.assert_all_freed()


@pytest.mark.parametrize(("version", "level"), [(12040, "WARNING"), (0, "INFO")])
def test_auto_logs_why_engines_are_not_used(
    gpu: Gpu, monkeypatch, caplog, version: int, level: str
):
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
        for request, stream in zip(requests, submit_together(session, requests), strict=True):
            assert_cpu_writes(bundle, request, stream.result().token_ids)
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
    assert plans == ["ar", "draft-8", "verify-8", "fused-8"]
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
