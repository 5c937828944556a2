"""scripts/gpu_check.sh and what it runs, as far as a machine without a GPU can tell."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from pass_run import assert_refused

from pass_runtime.backends.cuda import DeviceInfo, find_device
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME, EngineSet

ROOT = Path(__file__).resolve().parents[2]
GPU = {"name": "A | GPU", "memory.total": "81559 MiB", "compute_cap": "9.0"}
GIB = 1 << 30
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
}
CELLS = [(rows, capacity) for capacity in (64, 128) for rows in (1, 5, 9)]
FLAGS = [f"--{name.replace('_', '-')}={size}" for name, size in TINY.items()]
FLAGS += ["--rows=9", "--rows=1", "--rows=5", "--capacity=64", "--capacity=128", "--rounds=2"]


def load_script(name: str) -> ModuleType:
    """scripts/ is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check() -> ModuleType:
    return load_script("gpu_check")


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def run(check: ModuleType, steps: list, bundle: Path, output: Path, *flags: str) -> Result:
    """The command on a machine with a GPU, with these steps in place of its own."""
    bundle.mkdir()
    (bundle / FILE_NAME).touch()
    check.look = lambda: check.Found(GPU, "sm90", 80.0, {"torch": "2"})
    check.plan_steps = lambda *_: steps
    return CliRunner().invoke(check.main, [str(bundle), "-o", str(output), *flags])


@pytest.mark.skipif(find_device() is not None or shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path):
    command = [ROOT / "scripts/gpu_check.sh", "-o", tmp_path / "out"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "no NVIDIA GPU" in assert_refused(done.returncode, done.stdout, done.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("target", "libraries"), [("sm90", ["tensorrt"]), ("sm89", ["tensorrt", "tensorrt-rtx"])])
def test_a_library_without_the_target_is_skipped(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, libraries: list[str]
):
    monkeypatch.setattr(check, "nvidia_smi", lambda: GPU)
    monkeypatch.setattr(check, "find_device", lambda: DeviceInfo("GPU", target, GIB, 80 * GIB))
    monkeypatch.setattr(check, "why_not", lambda _: "")
    monkeypatch.setattr(check, "PROGRAM", Path(sys.executable))
    found = check.find()
    steps = {step.name: step for step in check.plan_steps(found, tmp_path, 8)}
    for name in LIBRARIES:
        for kind in ("build {}", "bench {} greedy", "bench {} sampled", "cpp {}", "step-time {}"):
            step = kind.format(name)
            if name in libraries:
                assert not steps[step].blocked
            else:
                assert f"tensorrt-rtx has no target {target}; it has sm75, " in steps[step].blocked
    assert steps["build tensorrt"].after == ("export",) and not steps["export"].blocked
    assert steps["bench tensorrt greedy"].after == ("build tensorrt",)
    assert not steps["peers"].blocked and not steps["step-time cuda"].blocked


def test_what_is_missing_blocks_its_steps_only(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / FILE_NAME).touch()
    model = SimpleNamespace(name="tiny", max_capacity=768, dtype="float32")
    monkeypatch.setattr(check, "read_manifest", lambda _: SimpleNamespace(model=model))
    monkeypatch.setattr(check, "PROGRAM", tmp_path / "nothing")
    without = check.plan_steps(check.Found(GPU, "sm89", 12.0), tmp_path, 8)
    missing = {"cuda": "no onnxruntime-gpu", "tensorrt": "no TensorRT", "torch": "no CUDA in torch"}
    steps = {s.name: s for s in check.plan_steps(check.Found(GPU, "sm89", 12.0, {}, missing), tmp_path, 8)}
    assert "export" not in steps
    assert "run scripts/build_cpp.sh" in next(s for s in without if s.name == "cpp tensorrt-rtx").blocked
    assert steps["bench cuda greedy"].blocked == "no onnxruntime-gpu" and steps["peers"].blocked == "no CUDA in torch"
    assert steps["step-time tensorrt"].blocked == "no TensorRT"
    assert steps["step-time tensorrt-rtx"].blocked == "7B need 24 GiB, this GPU has 12"
    build = steps["build tensorrt-rtx"]
    assert not build.blocked and build.command[-2:] == ("--max-seq-len", "768")
    peers = next(s for s in check.plan_steps(check.Found(GPU, "sm89", 80.0), tmp_path, 8) if s.name == "peers")
    assert "not in models/registry.toml" in peers.blocked and "fp32" in peers.command


def test_a_failed_step(check: ModuleType, tmp_path: Path):
    """Its figures so far and its last words are kept, what builds on it is skipped, and the rest is run."""
    wrote = 'import sys; open(sys.argv[1], "w").write(\'{"plans": [{"plan": "ar", "ratio": 1.5}]}\')'
    broken = python("import sys; print('[one]\\ntwo', file=sys.stderr); sys.exit(3)")
    steps = [
        check.Step("build x", broken),
        check.Step("bench x greedy", python("1 / 0"), after=("build x",)),
        check.Step("bench y greedy", (*python(wrote), check.OUTPUT)),
        check.Step("bench z greedy", (*python(f"{wrote}; 1 / 0"), check.OUTPUT)),
        check.Step("tests", python("print('2 skipped in 1s')")),
        check.Step("build y", python("import sys; sys.exit('error: B has engines y already; use --force')")),
    ]
    done = run(check, steps, tmp_path / "bundle", tmp_path / "out")
    assert done.exit_code == 1, done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "gpu_check.json",
        "gpu_check.log",
        "gpu_check.md",
    ]
    report = json.loads((tmp_path / "out/gpu_check.json").read_text())
    statuses = {step["name"]: (step["status"], step["reason"]) for step in report["steps"]}
    assert statuses["build x"] == ("failed", "[one] / two")
    assert statuses["bench x greedy"] == ("skipped", "build x failed")
    assert statuses["bench y greedy"] == ("ok", "")
    assert statuses["bench z greedy"][0] == "failed" and "ZeroDivisionError" in statuses["bench z greedy"][1]
    assert statuses["tests"] == ("skipped", "2 skipped in 1s") and statuses["build y"] == ("ok", "")
    assert [bool(step["data"]) for step in report["steps"]] == [False, False, True, True, False, False]
    assert report["gpu"] == GPU and report["versions"] == {"torch": "2"}
    text = (tmp_path / "out/gpu_check.md").read_text()
    assert "| name | A \\| GPU |" in text and "| ar | - | 1.50 | - | - |" in text
    for words in ("A | GPU", "build x failed", "[one] / two"):
        assert words in done.output


def test_only_some_steps(check: ModuleType, tmp_path: Path):
    steps = [check.Step(name, python("pass")) for name in ("export", "bench x", "bench y", "peers")]
    done = run(check, steps, tmp_path / "bundle", tmp_path / "out", "--only", "bench", "--only", "peers")
    report = json.loads((tmp_path / "out/gpu_check.json").read_text())
    assert done.exit_code == 0 and [step["name"] for step in report["steps"]] == ["bench x", "bench y", "peers"]


def test_the_budget(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    steps = [check.Step("peers", python("raise SystemExit('was run')")), check.Step("bench x", blocked="no x")]
    results = check.run_steps(steps, 10, tmp_path / "log", lambda _: None)
    assert [r.status for r in results] == ["skipped", "skipped"] and results[1].reason == "no x"
    assert results[0].reason == "it needs 45 s, and 10 s of the budget are left"
    monkeypatch.setitem(check.SECONDS, "bench", (0, 1))
    slow = check.Step("bench x", python("import time; time.sleep(60)"))
    for budget, expected in ((10, ("failed", "its limit")), (0.5, ("skipped", "the end of the budget"))):
        (result,) = check.run_steps([slow], budget, tmp_path / "log", lambda _: None)
        assert result.status == expected[0] and result.reason.endswith(expected[1]) and result.seconds < 9


def test_ctrl_c_keeps_what_is_written(tmp_path: Path):
    (tmp_path / FILE_NAME).touch()
    driver = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import gpu_check as g\n"
        "g.look = lambda: g.Found({'name': 'GPU'})\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "g.plan_steps = lambda *_: [g.Step('peers', (sys.executable, '-c', 'pass')),\n"
        "                           g.Step('bench x', (sys.executable, '-c', code))]\n"
        "g.main()\n"
    )
    log, command = tmp_path / "out/gpu_check.log", [sys.executable, "-c", driver, tmp_path, "-o", tmp_path / "out"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        until = time.monotonic() + 30
        while time.monotonic() < until and not (log.exists() and log.read_text().splitlines()[-1].isdigit()):
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        errors = running.communicate(timeout=30)[1]
    assert running.returncode == 130 and errors.endswith("interrupted\n")
    assert not Path(f"/proc/{log.read_text().splitlines()[-1]}").exists()
    assert [step["name"] for step in json.loads((tmp_path / "out/gpu_check.json").read_text())["steps"]] == ["peers"]


@pytest.fixture(scope="module")
def step_time(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, Path]:
    """The script, with nothing that outlives a test, and a directory with a tiny trunk."""
    module, keep = load_script("step_time"), tmp_path_factory.mktemp("keep")
    module.COPIED = {"gpu": 1 << 20, "cpu": 1 << 20}
    module.write_trunk(keep, module.Shape(**TINY))
    return module, keep


def cells(module: ModuleType, keep: Path, engine: str, output: Path) -> list[dict[str, float]]:
    done = CliRunner().invoke(module.main, ["--engine", engine, *FLAGS, "--keep", str(keep), "-o", str(output)])
    assert done.exit_code == 0, done.output
    report = json.loads(output.read_text())
    assert report["copy_bandwidth"] > 0 and report["shape"] == TINY
    assert "S=64: ms, ratio, of the bound" in done.output
    return report["cells"]


@pytest.mark.slow
def test_step_times_on_the_cpu(step_time: tuple[ModuleType, Path], tmp_path: Path):
    found = cells(*step_time, "cpu", tmp_path / "out.json")
    assert [(cell["rows"], cell["capacity"]) for cell in found] == CELLS
    assert all(cell["milliseconds"] > 0 and cell["bound_fraction"] > 0 for cell in found)
    assert [cell["ratio"] for cell in found if cell["rows"] == 1] == [1.0, 1.0]
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_step_times_on_a_fake_gpu(
    step_time: tuple[ModuleType, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
):
    """The engine's profiles, bindings and captured passes; building it is what only a real TensorRT can."""
    monkeypatch.syspath_prepend(str(ROOT / "tests/runtime"))
    from fake_gpu import FakeCuda, FakeTensorRT, FakeTensorRTX, _write_plan

    module, keep = step_time
    gpu = FakeCuda(target=(8, 9))
    fake = FakeTensorRTX if LIBRARIES[library].compiles_kernels else FakeTensorRT
    monkeypatch.setitem(sys.modules, LIBRARIES[library].module, fake(gpu))
    monkeypatch.setattr(module, "import_api", lambda: gpu)
    monkeypatch.setattr(module, "find_device", lambda: find_device(gpu))

    def build(directory, source, library, targets, capacities) -> EngineSet:
        engines = EngineSet.model_construct(
            directory=library.name,
            library=library.name,
            version="fake",
            lookahead=1,
            prefill_widths=(),
            max_batch_size=1,
        )
        engines.path(directory).mkdir(parents=True)
        file = _write_plan(directory, engines.path(directory), source)
        return engines.model_copy(update={"capacities": capacities, "engines": (file,)})

    monkeypatch.setattr(module, "build_engine", build)
    found = cells(module, keep, library, tmp_path / "out.json")
    assert [(cell["rows"], cell["capacity"]) for cell in found] == CELLS
    assert gpu.captures == len(CELLS) and not gpu.blocks and not gpu.streams


@pytest.mark.slow
def test_what_counts_as_read(step_time: tuple[ModuleType, Path]):
    """All parameters but the embeddings, random ones; every weight starts elsewhere in the pool."""
    module, _ = step_time
    shape = module.Shape(**TINY)
    parameters = dict(module.random_llama(shape).named_parameters())
    embeddings = parameters.pop("model.embed_tokens.weight")
    assert shape.weight_bytes == sum(2 * parameter.numel() for parameter in parameters.values())
    assert abs(float(embeddings.float().std()) - 0.02) < 1e-3
    places = [parameter.data_ptr() for parameter in parameters.values() if parameter.ndim == 2]
    assert len(set(places)) == len(places)
