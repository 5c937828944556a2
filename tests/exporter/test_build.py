"""pass-export build: its choices, its refusals, and builds that are interrupted or run together."""

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
from pass_exporter.engines import staging as engine_staging
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
from pass_runtime.bundle.manifest import FILE_NAME, Graph, Manifest, Profile, Tensor
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_runtime.files import open_locked

pytestmark = pytest.mark.tensorrt
pytest.importorskip("tensorrt_rtx", reason="pip install 'pass-toolkit[tensorrt-rtx]'")

RTX, FULL = LIBRARIES["tensorrt-rtx"], LIBRARIES["tensorrt"]
ADA = DeviceInfo("NVIDIA L4", "sm89", 20 << 30, 23 << 30)
HOPPER = DeviceInfo("NVIDIA H100", "sm90", 70 << 30, 79 << 30)
CONFIG = EngineConfig("tensorrt-rtx", compute_capability=("8.9",), max_seq_len=100)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_bundle, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture(scope="module")
def manifest(tiny_bundle: Path) -> Manifest:
    return read_manifest(tiny_bundle)


class Stopping(SilentProgress):
    """Raises KeyboardInterrupt at the n-th step of a phase."""

    def __init__(self, phase: str, step: int) -> None:
        self._phase, self._step, self._seen = phase, step, 0

    def phase(self, name: str):
        def step(_done: int, _total: int) -> None:
            self._seen += self._phase in name
            if self._seen == self._step:
                raise KeyboardInterrupt

        return step


@pytest.mark.slow
def test_an_interrupted_build_continues_with_the_next_engine(bundle: Path):
    before = (bundle / FILE_NAME).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        build_engines(bundle, CONFIG, Stopping("tails", 4))
    assert (bundle / FILE_NAME).read_bytes() == before
    with pytest.raises(KeyboardInterrupt):  # inside the library's own build of the trunk
        build_engines(bundle, CONFIG, Stopping("trunk", 1))
    assert (bundle / FILE_NAME).read_bytes() == before
    report = build_engines(bundle, CONFIG, SilentProgress())
    # Of 4 plans three samplers; log-probabilities, and logits processors.
    assert report.resumed == len(report.engines.engines) - 1 == 14
    assert [path.name for path in (bundle / "engines").iterdir()] == [report.engines.directory]
    assert {path.name for path in report.engines.path(bundle).iterdir()} == {
        e.file for e in report.engines.engines
    }


@pytest.fixture
def any_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines without the library, which takes seconds."""
    monkeypatch.setattr(
        EngineBuilder, "build", lambda _self, source, _step: repr(source.profiles).encode()
    )


@pytest.mark.usefixtures("any_engines")
def test_engines_are_replaced_with_force_only(bundle: Path):
    first = build_engines(bundle, CONFIG, SilentProgress()).engines
    with pytest.raises(PassError, match=r"already; use --force"):
        build_engines(bundle, CONFIG, SilentProgress())
    changed = replace(CONFIG, max_seq_len=200, force=True)
    second = build_engines(bundle, changed, SilentProgress()).engines
    assert second.capacities != first.capacities
    assert read_manifest(bundle).engines == (second,)
    assert not first.path(bundle).exists()
    other = build_engines(
        bundle, replace(CONFIG, compute_capability=("sm120",)), SilentProgress()
    ).engines
    assert read_manifest(bundle).engines == (second, other)


def test_only_one_build_at_a_time_makes_a_set(bundle: Path):
    with engine_staging.staging(bundle, "of-one-gpu"):
        with (
            pytest.raises(
                PassError,
                match=r"another pass-export build is making the engines of-one-gpu .*wait for it",
            ),
            engine_staging.staging(bundle, "of-one-gpu"),
        ):
            pytest.fail("the second build began")
        with engine_staging.staging(bundle, "of-another-gpu"):
            pass
    assert {path.name for path in (bundle / "engines").iterdir()} == {
        ".of-one-gpu.partial",
        ".of-another-gpu.partial",
    }


@pytest.mark.usefixtures("any_engines")
def test_only_one_build_at_a_time_changes_the_manifest(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise the manifest would list the engines of one of two builds that end together."""

    def read(path: Path) -> Manifest:
        with pytest.raises(BlockingIOError):
            open_locked(path / "engines" / ".manifest.lock")
        return read_manifest(path)

    monkeypatch.setattr(engine_staging, "read_manifest", read)
    built = build_engines(bundle, CONFIG, SilentProgress()).engines
    assert read_manifest(bundle).engines == (built,)


def source_of(node: onnx.NodeProto, dtype: str = "float32") -> Source:
    """Return a graph of one node with the input x [n] and the output y [n]."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    tensors = [Tensor(name=name, dtype=dtype, shape=("n",)) for name in ("x", "y")]
    info = Graph(file="g.onnx", inputs=(tensors[0],), outputs=(tensors[1],))
    profile = Profile(sizes={"n": (4, 4, 4)})
    return Source(
        info, model.SerializeToString(), Path("g.onnx"), info.inputs, info.outputs, (profile,), {}
    )


def build_one(source: Source) -> bytes:
    return EngineBuilder(RTX, ("sm89",)).build(source, lambda _done, _steps: None)


def test_engines_that_compile_kernels_allocate_nothing_while_they_run(
    monkeypatch: pytest.MonkeyPatch,
):
    """A CUDA graph cannot allocate. The library refuses operators that need to."""
    import tensorrt_rtx as trt

    made, config = [], EngineBuilder._config
    monkeypatch.setattr(
        EngineBuilder,
        "_config",
        lambda builder, *given: (made.append(config(builder, *given)), made[-1])[1],
    )
    assert build_one(source_of(helper.make_node("Neg", ["x"], ["y"])))
    assert made[0].get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)


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
def test_columns_just_below_the_capacity_are_left_out(capacity: int, columns: tuple[int, ...]):
    assert column_steps(capacity) == columns


def test_an_unsupported_operator_is_refused_by_name():
    node = helper.make_node("Bernoulli", ["x"], ["y"], name="toss")
    with pytest.raises(
        PassError, match=r"g\.onnx: .* node 'toss' \(Bernoulli\): .*Reducing a failing graph"
    ):
        build_one(source_of(node))


def test_a_graph_with_other_tensors_than_the_manifest_is_refused():
    node = helper.make_node("Neg", ["x"], ["y"])
    assert build_one(source_of(node))
    with pytest.raises(
        PassError, match=r"x is .*float32.* in tensorrt-rtx, but .*float16.* in the manifest"
    ):
        build_one(source_of(node, "float16"))
    with pytest.raises(PassError, match="is missing in tensorrt-rtx"):
        extra = Tensor(name="z", dtype="float32", shape=(1,))
        build_one(replace(source_of(node), inputs=(*source_of(node).inputs, extra)))


def test_a_cache_that_is_not_updated_in_place_is_refused(tiny_bundle: Path, manifest: Manifest):
    trunk = graph_sources(tiny_bundle, manifest, (512,))[-1]
    with pytest.raises(PassError, match=r"present_key\.0 does not update past_key\.0 in place"):
        wrong = {name: source for name, source in trunk.aliases.items() if name != "present_key.0"}
        EngineBuilder(RTX, ("sm89",)).build(
            replace(trunk, aliases=wrong), lambda _done, _steps: None
        )


@pytest.mark.parametrize(
    ("chosen", "asked", "device", "expected"),
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
def test_targets(chosen, asked, device, expected):
    config = EngineConfig(chosen.name, compute_capability=asked)
    if isinstance(expected, tuple):
        assert choose_targets(chosen, config.compute_capability, device) == expected
        return
    with pytest.raises(PassError, match=expected):
        choose_targets(chosen, config.compute_capability, device)


def test_number_formats_and_targets(manifest: Manifest):
    model = manifest.model
    for update, targets, missing in (
        ({"dtype": "bfloat16"}, ("sm75", "sm89"), "sm75 does not support bfloat16"),
        ({"weights": "fp8"}, ("sm86", "sm89"), "sm86 does not support fp8"),
        ({"dtype": "float16", "weights": "int4"}, ("sm75",), "sm75 does not support int4"),
        ({"dtype": "float32"}, ("sm75", "sm80"), "sm75 does not support float32"),
    ):
        changed = manifest.model_copy(update={"model": model.model_copy(update=update)})
        check_formats(changed, targets[1:])
        with pytest.raises(PassError, match=missing):
            check_formats(changed, targets)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 768),  # the model's own limit
        ({"max_seq_len": 100}, 192),  # and the widest window, in steps of 64
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
def test_capacity(manifest: Manifest, options, expected):
    config = EngineConfig("tensorrt", **options)
    if isinstance(expected, int):
        assert choose_capacity(config.capacity, config.max_seq_len, manifest) == expected
        return
    with pytest.raises(PassError, match=expected):
        choose_capacity(config.capacity, config.max_seq_len, manifest)


def test_an_engine_that_needs_too_much_memory_is_refused(tiny_bundle: Path, manifest: Manifest):
    profiles = graph_sources(tiny_bundle, manifest, (512,))[-1].profiles
    small, large = (estimate(tiny_bundle, manifest, profiles, 512, batch, 0) for batch in (1, 8))
    cache = 2 * 2 * 2 * 16 * 512 * 4  # keys and values, layers, KV heads, head size, columns, fp32
    assert (small.kv_cache, large.kv_cache) == (cache, 8 * cache)
    assert small.weights == sum(
        (tiny_bundle / name).stat().st_size for name in ("trunk.onnx", "trunk.onnx.data")
    )
    check_fits(small, small.total, 512)
    check_fits(small, None, 512)
    with pytest.raises(PassError, match=r"need about .* GiB .*--max-seq-len .*--weights int4"):
        check_fits(small, small.total - 1, 512)


def test_prefill_widths(tiny_bundle: Path, manifest: Manifest):
    """They are limited by the capacity and by a GiB for the rows; the estimate of memory includes
    them."""
    columns = (512, 2048, 4160)
    large = manifest.model_copy(update={"model": manifest.model.model_copy(update={"heads": 64})})

    def chosen(given: str | None = None, manifest: Manifest = manifest) -> tuple[int, ...]:
        widths = None if given is None else tuple(map(int, given.split(",")))
        return choose_widths(widths, manifest, columns)

    assert (chosen(), chosen(manifest=large)) == ((2048, 1024, 256, 32), (256, 32))
    assert chosen("64,1024,64") == (1024, 64)
    for wrong in ("1", "5000", "256,0"):
        with pytest.raises(PassError, match="from 2 to the capacity 4160, not"):
            chosen(wrong)
    sources = [
        graph_sources(tiny_bundle, manifest, columns, prefill_widths=widths)[-1]
        for widths in (chosen(), (256, 32))
    ]
    wide, narrow = (
        {(p.sizes["width"][0], p.sizes["columns"][0]) for p in each.profiles} for each in sources
    )
    assert wide - narrow == {(1024, 2048), (1024, 4160), (2048, 2048), (2048, 4160)}
    need = [
        estimate(tiny_bundle, manifest, each.profiles, 4160, 1, 0).activations for each in sources
    ]
    assert need[0] > 7 * need[1]


@pytest.mark.slow
def test_a_trunk_with_wide_chunks_builds(tmp_path: Path):
    model = make_model(tmp_path / "model", max_position_embeddings=4096, num_hidden_layers=1)
    bundle = export_bundle(model, tmp_path / "bundle", lookahead=1, dtype="fp16")
    manifest = read_manifest(bundle)
    trunk = graph_sources(bundle, manifest, (2176,), least_width=2, prefill_widths=(2048, 1024))[-1]
    assert len(EngineBuilder(RTX, ("sm89",)).build(trunk, lambda _done, _steps: None))


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
    f"{BUILD} --prefill-widths 9,x": "for '--prefill-widths': give integers separated by commas, "
    "such as 1024,256, not '9,x'",
    "--model x --capacity 512": "--capacity is about engines: add --engine",
    "--force build {bundle} --engine tensorrt": "put --force after `build`, or leave it out",
    "--lookahead 4": "name the model",
    "--model x --engine tensorrt": "pip install 'pass-toolkit[tensorrt]'",
}


@pytest.mark.parametrize("line", REFUSED_LINES)
def test_a_refusal_is_one_line(tiny_bundle: Path, line: str):
    result = CliRunner().invoke(main, [part.format(bundle=tiny_bundle) for part in line.split()])
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert REFUSED_LINES[line] in " ".join(last.split())
    assert last.lower().startswith("error: ")
