"""pass-export build: the capacity, widths and targets that it chooses, what it refuses, and builds
that are interrupted or run at the same time."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from conftest import SilentProgress, export_bundle, make_model
from pass_exporter.cli import main
from pass_exporter.config import EngineConfig
from pass_exporter.engines import install
from pass_exporter.engines.build import build_engines, graph_sources
from pass_exporter.engines.builder import EngineBuilder, Source
from pass_exporter.engines.memory import check_fits, estimate
from pass_exporter.engines.profiles import column_steps
from pass_exporter.engines.target import (
    check_formats,
    choose_capacity,
    choose_targets,
    choose_widths,
)
from pass_runtime.backends.cuda import DeviceInfo
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME, Graph, Manifest, Profile
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_runtime.files import open_locked

pytestmark = pytest.mark.tensorrt
pytest.importorskip("tensorrt_rtx", reason="pip install 'pass-toolkit[tensorrt-rtx]'")

RTX, FULL = LIBRARIES["tensorrt-rtx"], LIBRARIES["tensorrt"]
ADA = DeviceInfo("NVIDIA L4", "sm89", 20 << 30, 23 << 30)
HOPPER = DeviceInfo("NVIDIA H100", "sm90", 70 << 30, 79 << 30)
CONFIG = EngineConfig("tensorrt-rtx", compute_capability=("8.9",), max_seq_len=100)
"""Engines that can be built without a GPU, for ADA."""


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_bundle, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="module")
def manifest(tiny_bundle: Path) -> Manifest:
    return read_manifest(tiny_bundle)


class Interrupted(SilentProgress):
    def __init__(self, phase: str, step: int) -> None:
        self._phase, self._steps_left = phase, step

    def phase(self, name: str):
        def step(_done: int, _total: int) -> None:
            self._steps_left -= self._phase in name
            if self._steps_left == 0:
                raise KeyboardInterrupt

        return step


@pytest.mark.slow
def test_an_interrupted_build_continues_with_the_next_engine(bundle: Path):
    before = (bundle / FILE_NAME).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        build_engines(bundle, CONFIG, Interrupted("tails", 4))
    assert (bundle / FILE_NAME).read_bytes() == before
    with pytest.raises(KeyboardInterrupt):  # inside the library's own build of the trunk
        build_engines(bundle, CONFIG, Interrupted("trunk", 1))
    assert (bundle / FILE_NAME).read_bytes() == before
    report = build_engines(bundle, CONFIG, SilentProgress())
    # The engines of all tails are kept: of three samplers for six windows, log-probabilities and
    # logits processors.
    assert report.resumed == len(report.engines.engines) - 1 == 20
    assert [path.name for path in (bundle / "engines").iterdir()] == [report.engines.directory]
    assert {path.name for path in report.engines.path(bundle).iterdir()} == {
        e.file for e in report.engines.engines
    }


@pytest.fixture
def any_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes seconds for each engine."""
    monkeypatch.setattr(
        EngineBuilder, "build", lambda _self, source, _step: repr(source.profiles).encode()
    )


@pytest.mark.usefixtures("any_engines")
def test_engines_are_replaced_with_force_only(bundle: Path):
    first = build_engines(bundle, CONFIG, SilentProgress()).engines
    with pytest.raises(PassError, match=r"already; use --force"):
        build_engines(bundle, CONFIG, SilentProgress())
    longer = replace(CONFIG, max_seq_len=200, force=True)
    second = build_engines(bundle, longer, SilentProgress()).engines
    assert second.capacities != first.capacities
    assert read_manifest(bundle).engines == (second,)
    assert not first.path(bundle).exists()
    for_other_gpu = replace(CONFIG, compute_capability=("sm120",))
    other = build_engines(bundle, for_other_gpu, SilentProgress()).engines
    assert read_manifest(bundle).engines == (second, other)


def test_only_one_build_at_a_time_makes_engines_for_the_same_gpu(bundle: Path):
    with install.staging(bundle, "of-one-gpu"):
        with (
            pytest.raises(
                PassError,
                match=r"another pass-export build is making the engines of-one-gpu .*wait for it",
            ),
            install.staging(bundle, "of-one-gpu"),
        ):
            pytest.fail("the second build began")
        with install.staging(bundle, "of-another-gpu"):
            pass
    assert {path.name for path in (bundle / "engines").iterdir()} == {
        ".of-one-gpu.partial",
        ".of-another-gpu.partial",
    }


@pytest.mark.usefixtures("any_engines")
def test_only_one_build_at_a_time_changes_the_manifest(bundle, monkeypatch):
    def read(path: Path) -> Manifest:
        with pytest.raises(BlockingIOError):
            open_locked(path / "engines" / ".manifest.lock")
        return read_manifest(path)

    monkeypatch.setattr(install, "read_manifest", read)
    built = build_engines(bundle, CONFIG, SilentProgress()).engines
    assert read_manifest(bundle).engines == (built,)


def source_of(node: onnx.NodeProto) -> Source:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    info, profile = Graph(file="g.onnx", inputs=(), outputs=()), Profile(sizes={"n": (4, 4, 4)})
    return Source(info, model.SerializeToString(), Path("g.onnx"), (profile,))


def build_one(source: Source) -> bytes:
    return EngineBuilder(RTX, ("sm89",)).build(source, lambda _done, _steps: None)


def test_engines_that_compile_kernels_allocate_nothing_while_they_run(monkeypatch):
    import tensorrt_rtx as trt

    configs, make_config = [], EngineBuilder._config

    def recorded_config(builder, *arguments):
        configs.append(make_config(builder, *arguments))
        return configs[-1]

    monkeypatch.setattr(EngineBuilder, "_config", recorded_config)
    assert build_one(source_of(helper.make_node("Neg", ["x"], ["y"])))
    assert configs[0].get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)


@pytest.mark.parametrize(
    ("capacity", "columns"),
    [
        (128, (128,)),
        (576, (576,)),
        (640, (512, 640)),
        (2112, (512, 2112)),
        (4160, (512, 2048, 4160)),
    ],
)
def test_columns_just_below_the_capacity_get_no_profile_of_their_own(capacity, columns):
    assert column_steps(capacity) == columns


def test_the_error_for_an_unsupported_operator_names_its_node():
    node = helper.make_node("Bernoulli", ["x"], ["y"], name="toss")
    with pytest.raises(
        PassError, match=r"g\.onnx: .* node 'toss' \(Bernoulli\): .*Reducing a failing graph"
    ):
        build_one(source_of(node))


@pytest.mark.parametrize(
    ("library", "compute_capability", "device", "expected"),
    [
        (RTX, (), ADA, ("sm89",)),
        (RTX, ("12.0", "sm86"), ADA, ("sm86", "sm120")),
        (RTX, ("SM89", "8.9"), None, ("sm89",)),
        (RTX, (), None, "no GPU is visible"),
        (RTX, (), HOPPER, "has no target sm90"),
        (RTX, ("7.0",), None, "has no target sm70"),
        (FULL, (), HOPPER, ("sm90",)),
        (FULL, ("9.0",), HOPPER, ("sm90",)),
        (FULL, ("8.9",), HOPPER, "which is sm90, not sm89"),
        (FULL, (), None, "none is visible"),
    ],
)
def test_targets_are_those_that_are_named_or_the_gpu(library, compute_capability, device, expected):
    config = EngineConfig(library.name, compute_capability=compute_capability)
    if isinstance(expected, tuple):
        assert choose_targets(library, config.compute_capability, device) == expected
        return
    with pytest.raises(PassError, match=expected):
        choose_targets(library, config.compute_capability, device)


def test_a_target_that_does_not_support_a_number_format_is_refused(manifest: Manifest):
    model = manifest.model
    for update, targets, error in (
        ({"dtype": "bfloat16"}, ("sm75", "sm89"), "sm75 does not support bfloat16"),
        ({"weights": "fp8"}, ("sm86", "sm89"), "sm86 does not support fp8"),
        ({"dtype": "float16", "weights": "int4"}, ("sm75",), "sm75 does not support int4"),
        ({"dtype": "float32"}, ("sm75", "sm80"), "sm75 does not support float32"),
    ):
        changed = manifest.model_copy(update={"model": model.model_copy(update=update)})
        check_formats(changed, targets[1:])
        with pytest.raises(PassError, match=error):
            check_formats(changed, targets)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 768),  # the model's limit
        ({"max_seq_len": 100}, 192),  # 100 tokens and the widest window, 49, as a multiple of 64
        ({"max_seq_len": 768}, 768),
        ({"capacity": 200}, 200),
        ({"capacity": 200, "max_seq_len": 180}, 200),
        ({"capacity": 201}, "multiple of 4"),
        ({"capacity": 40}, "above 49"),
        ({"capacity": 1024}, "at most 768"),
        ({"capacity": 100, "max_seq_len": 180}, "is above --capacity 100"),
        ({"max_seq_len": 0}, "must be 1 to 768"),
        ({"max_seq_len": 5000}, "must be 1 to 768"),
    ],
)
def test_the_capacity_holds_the_longest_text_and_the_widest_window(manifest, options, expected):
    config = EngineConfig("tensorrt", **options)
    if isinstance(expected, int):
        assert choose_capacity(config.capacity, config.max_seq_len, manifest) == expected
        return
    with pytest.raises(PassError, match=expected):
        choose_capacity(config.capacity, config.max_seq_len, manifest)


def test_an_engine_that_needs_too_much_memory_is_refused(tiny_bundle: Path, manifest: Manifest):
    profiles = graph_sources(tiny_bundle, manifest, (512,))[-1].profiles
    small, large = (estimate(tiny_bundle, manifest, profiles, 512, batch, 0) for batch in (1, 8))
    # keys and values, layers, KV heads, head size, columns, bytes of fp32
    cache = 2 * 2 * 2 * 16 * 512 * 4
    assert (small.kv_cache, large.kv_cache) == (cache, 8 * cache)
    assert small.weights == sum(
        (tiny_bundle / name).stat().st_size for name in ("trunk.onnx", "trunk.onnx.data")
    )
    check_fits(small, small.total, 512)
    check_fits(small, None, 512)
    with pytest.raises(PassError, match=r"need about .* GiB .*--max-seq-len .*--weights int4"):
        check_fits(small, small.total - 1, 512)


def test_prefill_widths(tiny_bundle: Path, manifest: Manifest):
    columns = (512, 2048, 4160)  # the last is the capacity
    large = manifest.model_copy(update={"model": manifest.model.model_copy(update={"heads": 64})})
    default = choose_widths((), manifest, columns)
    assert default == (2048, 1024, 256, 32)
    assert choose_widths((), large, columns) == (256, 32)
    assert choose_widths((64, 1024, 64), manifest, columns) == (1024, 64)
    for wrong in ((1,), (5000,), (256, 0)):
        with pytest.raises(PassError, match="from 2 to the capacity 4160, not"):
            choose_widths(wrong, manifest, columns)
    profiles_of_widths = [
        graph_sources(tiny_bundle, manifest, columns, prefill_widths=widths)[-1].profiles
        for widths in (default, (256, 32))
    ]
    wide, narrow = (
        {(profile.sizes["width"][0], profile.sizes["columns"][0]) for profile in profiles}
        for profiles in profiles_of_widths
    )
    assert wide - narrow == {(1024, 2048), (1024, 4160), (2048, 2048), (2048, 4160)}
    wide_bytes, narrow_bytes = (
        estimate(tiny_bundle, manifest, profiles, 4160, 1, 0).activations
        for profiles in profiles_of_widths
    )
    assert wide_bytes > 7 * narrow_bytes


@pytest.mark.slow
def test_a_trunk_for_wide_prefill_chunks_can_be_built(tmp_path: Path):
    model = make_model(tmp_path / "model", max_position_embeddings=4096, num_hidden_layers=1)
    bundle = export_bundle(model, tmp_path / "bundle", lookahead=1, dtype="fp16")
    manifest = read_manifest(bundle)
    trunk = graph_sources(bundle, manifest, (2176,), least_width=2, prefill_widths=(2048, 1024))[-1]
    assert build_one(trunk)


BUILD = "build {bundle} --engine tensorrt-rtx"
REFUSED_LINES = {
    BUILD: "no GPU is visible; name the target: --compute-capability "
    "sm75|sm80|sm86|sm89|sm120|sm121, or make it visible: cuda",
    "build {bundle} --engine tensorrt": "pip install 'pass-toolkit[tensorrt]'",
    "build {bundle} --engine abacus": "'abacus' is not one of",
    "build /nowhere --engine tensorrt-rtx": "is not a bundle",
    f"{BUILD} --compute-capability 9.0": "has no target sm90",
    f"{BUILD} --max-batch-size 0": "must be 1 to 256",
    f"{BUILD} --workspace 0": "at least 1 MiB",
    f"{BUILD} --compute-capability 8.9 --device-memory 0.1": "the GPU has 0.10 GiB",
    f"{BUILD} --compute-capability 8.9 --verify": "--verify runs the engines and no GPU is visible",
    f"{BUILD} --compute-capability 8.9 --timing-cache x": "leave out --timing-cache",
    f"{BUILD} --prefill-widths 9,x": "--prefill-widths must list numbers, as in 1,2,5, not '9,x'",
    "--model x --capacity 512": "--capacity is about engines: add --engine",
    "--force build {bundle} --engine tensorrt": "put --force after `build`, or leave it out",
    "--lookahead 4": "name the model",
    "--model x --engine tensorrt": "pip install 'pass-toolkit[tensorrt]'",
}


@pytest.mark.parametrize("line", REFUSED_LINES)
def test_a_refusal_is_one_line(tiny_bundle: Path, line: str):
    result = CliRunner().invoke(main, [part.format(bundle=tiny_bundle) for part in line.split()])
    assert result.exit_code == 2
    error = result.stderr.strip().splitlines()[-1]
    assert REFUSED_LINES[line] in " ".join(error.split())
    assert error.lower().startswith("error: ")
