"""scripts/gpu_check.sh and what it runs, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from pass_run import assert_refused

from pass_runtime.backends.cuda import DeviceInfo, find_device, why_no_device
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.errors import PassError

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/runtime")]

import gpu_check  # noqa: E402
from fake_gpu import FakeCuda  # noqa: E402
from gpu_checks import device, machine, running, steps  # noqa: E402
from gpu_checks.machine import Found  # noqa: E402
from gpu_checks.report import tables, verdict  # noqa: E402
from gpu_checks.running import run_steps  # noqa: E402
from gpu_checks.steps import OUTPUT, Step, plan_steps  # noqa: E402

GPU = {"name": "A | GPU", "memory.total": "81559 MiB", "compute_cap": "9.0"}
GIB = 1 << 30
WROTE = 'import sys; open(sys.argv[1], "w").write(\'{"plans": [{"plan": "ar", "ratio": 1.5}], "uncaptured": %s}\')'


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def run(monkeypatch: pytest.MonkeyPatch, given: list[Step], bundle: Path, output: Path, *flags: str) -> Result:
    """The command on a machine with a GPU, with these steps in place of its own."""
    bundle.mkdir()
    (bundle / FILE_NAME).touch()
    monkeypatch.setattr(gpu_check, "look", lambda: Found(GPU, "sm90", 80.0, {"torch": "2"}))
    monkeypatch.setattr(gpu_check, "plan_steps", lambda *_: given)
    return CliRunner().invoke(gpu_check.main, [str(bundle), "-o", str(output), *flags])


@pytest.mark.skipif(find_device() is not None or shutil.which("nvidia-smi") is not None, reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path):
    """Nothing ran, and the report says so, and what would have been run."""
    command = [ROOT / "scripts/gpu_check.sh", "-o", tmp_path / "out"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1].startswith("VERDICT: nothing ran (no NVIDIA GPU: nvidia-smi")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["verdict"] == "nothing ran"
    assert {(step["status"], step["reason"]) for step in report["steps"]} == {("skipped", "no NVIDIA GPU")}
    assert {"device", "tiny cuda", "layers tensorrt", "peers"} <= {step["name"] for step in report["steps"]}
    assert (tmp_path / "out/report.md").read_text().startswith("**VERDICT: nothing ran** (no NVIDIA GPU")


def test_a_bundle_that_is_none_is_refused(tmp_path: Path):
    command = [ROOT / "scripts/gpu_check.sh", tmp_path / "nothing", "-o", tmp_path / "out"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "is not a bundle" in assert_refused(done.returncode, done.stdout, done.stderr)
    assert not (tmp_path / "out").exists()


def test_pieces_to_carry(tmp_path: Path):
    """They are small, whole, and become the toolkit and the bundle again."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    bundle = tmp_path / "a bundle"
    bundle.mkdir()
    (bundle / FILE_NAME).write_text("{}")
    (bundle / "weights").write_bytes(os.urandom(70 << 20))
    command = [ROOT / "scripts/gpu_check.sh", "--pack", tmp_path / "to", bundle]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pieces = sorted((tmp_path / "to").glob("pass-toolkit.tar.*"))
    assert len(pieces) >= 2 and all(piece.stat().st_size <= 64 << 20 for piece in pieces)
    joined = "sha256sum -c SHA256SUMS && mkdir there && cat pass-toolkit.tar.* | tar x -C there"
    subprocess.run(joined, shell=True, cwd=tmp_path / "to", check=True, capture_output=True)
    there = tmp_path / "to/there"
    assert (there / "scripts/gpu_check.sh").read_bytes() == (ROOT / "scripts/gpu_check.sh").read_bytes()
    assert (there / "a bundle/weights").stat().st_size == 70 << 20
    alone = subprocess.run([*command[:2], tmp_path / "alone"], capture_output=True, text=True, check=False)
    assert alone.returncode == 0 and "&& scripts/gpu_check.sh\n" in alone.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is not empty" in assert_refused(again.returncode, again.stdout, again.stderr)


@pytest.mark.parametrize(
    ("status", "uncaptured", "expected", "code"),
    [
        ("ok", {}, "works", 0),
        ("ok", {"tail.onnx": "capture refused"}, "works but not captured", 4),
        ("failed", {"tail.onnx": "capture refused"}, "wrong", 1),
        ("skipped", {}, "nothing ran", 3),
    ],
)
def test_the_verdict(status: str, uncaptured: dict[str, str], expected: str, code: int, tmp_path: Path, monkeypatch):
    end = {"ok": "", "failed": "; sys.exit('broken')", "skipped": ""}[status]
    blocked = "no library" if status == "skipped" else None
    given = [
        Step("export", python("pass")),
        Step("bench x", (*python(WROTE % json.dumps(uncaptured).replace("'", "") + end), OUTPUT), blocked),
    ]
    done = run(monkeypatch, given, tmp_path / "bundle", tmp_path / "out")
    assert done.exit_code == code
    said = done.output.splitlines()[-1]
    assert said.startswith(f"VERDICT: {expected} (")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["verdict"] == expected and report["why"] in said
    if uncaptured and status == "ok":
        assert "capture refused" in said


@pytest.mark.parametrize(("target", "libraries"), [("sm90", ["tensorrt"]), ("sm89", ["tensorrt", "tensorrt-rtx"])])
def test_a_library_without_the_target_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, libraries: list[str]
):
    monkeypatch.setattr(machine, "nvidia_smi", lambda: GPU)
    monkeypatch.setattr(machine, "find_device", lambda: DeviceInfo("GPU", target, GIB, 80 * GIB))
    monkeypatch.setattr(machine, "why_not", lambda _: "")
    monkeypatch.setattr(steps, "PROGRAM", Path(sys.executable))
    found = {step.name: step for step in plan_steps(machine.find(), tmp_path, 8)}
    kinds = (
        "tiny {}",
        "layers {}",
        "build {}",
        "rows {}",
        "bench {} greedy",
        "bench {} sampled",
        "cpp {}",
        "step-time {}",
    )
    for name in LIBRARIES:
        for kind in kinds:
            step = kind.format(name)
            if name in libraries:
                assert not found[step].blocked
            else:
                assert f"tensorrt-rtx has no target {target}; it has sm75, " in found[step].blocked
    assert found["build tensorrt"].after == ("export",) and not found["export"].blocked
    assert found["bench tensorrt greedy"].after == ("build tensorrt",)
    assert not found["peers"].blocked and not found["step-time cuda"].blocked


def test_what_tells_most_comes_first(tmp_path: Path):
    names = [step.name.split()[0] for step in plan_steps(Found(GPU, "sm89", 80.0), tmp_path, 8)]
    order = [
        "device",
        "tiny",
        "layers",
        "export",
        "build",
        "rows",
        "batch",
        "bench",
        "cpp",
        "tests",
        "attention",
        "step-time",
        "peers",
    ]
    firsts = list(dict.fromkeys(names))
    assert sorted(firsts) == sorted(order) and set(firsts) == set(running.SECONDS)
    assert firsts == order


@pytest.mark.parametrize(("memory", "blocked"), [(23.6, False), (22.2, False), (16.0, True)])
def test_a_card_of_24_gb_reports_less(memory: float, blocked: bool, tmp_path: Path):
    found = {step.name: step for step in plan_steps(Found(GPU, "sm89", memory), tmp_path, 8)}
    assert bool(found["step-time cuda"].blocked) == blocked
    assert not found["layers cuda"].blocked


def test_what_is_missing_blocks_its_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / FILE_NAME).touch()
    model = SimpleNamespace(name="tiny", max_capacity=768, dtype="float32")
    monkeypatch.setattr(
        steps, "read_manifest", lambda _: SimpleNamespace(model=model, lookahead=SimpleNamespace(length=3))
    )
    monkeypatch.setattr(steps, "PROGRAM", tmp_path / "nothing")
    without = plan_steps(Found(GPU, "sm89", 12.0), tmp_path, 8)
    alone = plan_steps(Found(GPU, "sm89", 12.0, {}, dict.fromkeys(steps.DEVICES, "not here")), tmp_path, 8)
    missing = {"cuda": "no onnxruntime-gpu", "tensorrt": "no TensorRT", "torch": "no CUDA in torch"}
    found = {s.name: s for s in plan_steps(Found(GPU, "sm89", 12.0, {}, missing), tmp_path, 8)}
    assert "export" not in found
    assert "run scripts/build_cpp.sh" in next(s for s in without if s.name == "cpp tensorrt-rtx").blocked
    assert found["bench cuda greedy"].blocked == "no onnxruntime-gpu" and found["peers"].blocked == "no CUDA in torch"
    assert found["step-time tensorrt"].blocked == "no TensorRT"
    assert found["step-time tensorrt-rtx"].blocked == "7B need 22 GiB, this GPU has 12.0"
    assert "--rows 1,4,16" in " ".join(found["rows tensorrt"].command)
    build = found["build tensorrt-rtx"]
    assert not build.blocked and build.command[-2:] == ("--max-seq-len", "768")
    assert found["layers torch"].blocked == "not needed beside layers tensorrt-rtx"
    assert next(s for s in alone if s.name == "layers torch").blocked is None
    peers = next(s for s in plan_steps(Found(GPU, "sm89", 80.0), tmp_path, 8) if s.name == "peers")
    assert "not in models/registry.toml" in peers.blocked and "fp32" in peers.command


@pytest.mark.parametrize(("code", "hint"), [(35, "older than the CUDA library"), (100, "visible to nvidia-smi")])
def test_why_cuda_sees_no_gpu(code: int, hint: str, monkeypatch: pytest.MonkeyPatch):
    """An old driver is not a missing package."""
    api = SimpleNamespace(cudaGetDeviceCount=lambda: (code, 0))
    monkeypatch.setattr(machine, "nvidia_smi", lambda: GPU)
    monkeypatch.setattr(machine, "find_device", lambda: find_device(api))
    monkeypatch.setattr(machine, "why_no_device", lambda: why_no_device(api))
    missing = machine.find().missing
    assert f"CUDA error {code}" in missing["cuda-python"] and hint in missing["cuda-python"]
    assert missing["tensorrt"] == missing["cuda-python"]


def test_the_device_is_checked():
    gpu = FakeCuda(target=(8, 9))
    report = device.check(gpu)
    found = {each["check"]: each["result"] for each in report["checks"]}
    assert found["copy"] == "unchanged" and found["capture"] == "replayed twice" and not report["uncaptured"]
    assert not gpu.blocks and not gpu.streams and not gpu.graphs


def test_a_device_that_refuses_captures(monkeypatch: pytest.MonkeyPatch):
    gpu = FakeCuda(target=(8, 9))
    monkeypatch.setattr(gpu, "cudaStreamBeginCapture", lambda *_: (900,), raising=False)
    report = device.check(gpu)
    assert "CUDA error 900" in report["uncaptured"]["a copy"]
    assert not gpu.blocks and not gpu.streams


def test_a_device_without_memory():
    gpu = FakeCuda(target=(8, 9), limit=device.SIZE - 1)
    with pytest.raises(PassError, match="the GPU has no 1 MiB left"):
        device.check(gpu)
    assert not gpu.blocks and not gpu.streams


def test_a_device_that_copies_wrongly(monkeypatch: pytest.MonkeyPatch):
    gpu = FakeCuda(target=(8, 9))
    monkeypatch.setattr(device.Cuda, "download", lambda _self, array, _address: array.fill(1))
    with pytest.raises(PassError, match="a copy to the GPU and back changed"):
        device.check(gpu)


@pytest.mark.slow
def test_the_tiny_model(tmp_path: Path):
    """On the CPU, against itself: it is made, and every plan writes the same."""
    command = [sys.executable, ROOT / "scripts/gpu_checks/tiny.py", "--device", "cpu", "-o", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert [each["same_tokens"] for each in report["plans"]] == [True] * 4 and report["uncaptured"] == {}


def test_times_of_some_layers_are_extrapolated_by_what_a_pass_reads():
    shape = vars(running.Result("x", "ok"))  # any mapping is no shape
    assert "7B, extrapolated" not in str(
        tables(Found(GPU), [running.Result("bench x", "ok", 0, "", {"plans": [shape]})])
    )
    from step_time import Shape

    data = {"shape": vars(Shape(num_hidden_layers=4)), "cells": [{"rows": 1, "capacity": 512, "milliseconds": 2.0}]}
    (row,) = tables(Found(GPU), [running.Result("layers cuda", "ok", 0, "", data)])["layers cuda"]
    read = [Shape(num_hidden_layers=n).weight_bytes + Shape(num_hidden_layers=n).cache_bytes(512) for n in (4, 32)]
    assert row["7B, extrapolated"] == f"{2 * read[1] / read[0]:.2f}"


def test_times_of_windows_are_shown():
    row = {"rows": 9, "window": "prefill-9", "lookahead_rows": 0, "trunk_milliseconds": 1.5, "tail_milliseconds": None}
    (shown,) = tables(Found(GPU), [running.Result("rows cuda", "ok", 0, "", {"rows": [row]})])["rows cuda"]
    assert [*shown.values()] == ["prefill-9", "9", "-", "1.50", "-"]


def test_a_failed_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its figures so far and its last words are kept, what builds on it is skipped, and the rest is run."""
    broken = python("import sys; print('[one]\\ntwo', file=sys.stderr); sys.exit(3)")
    given = [
        Step("build x", broken),
        Step("bench x greedy", python("1 / 0"), after=("build x",)),
        Step("bench y greedy", (*python(WROTE % "{}"), OUTPUT)),
        Step("bench z greedy", (*python(f"{WROTE % '{}'}; 1 / 0"), OUTPUT)),
        Step("tests", python("print('2 skipped in 1s')")),
        Step("build y", python("import sys; sys.exit('error: B has engines y already; use --force')")),
    ]
    done = run(monkeypatch, given, tmp_path / "bundle", tmp_path / "out")
    assert done.exit_code == 1, done.output
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["gpu_check.log", "report.json", "report.md"]
    report = json.loads((tmp_path / "out/report.json").read_text())
    statuses = {step["name"]: (step["status"], step["reason"]) for step in report["steps"]}
    assert statuses["build x"] == ("failed", "[one] / two")
    assert statuses["bench x greedy"] == ("skipped", "build x failed")
    assert statuses["bench y greedy"] == ("ok", "")
    assert statuses["bench z greedy"][0] == "failed" and "ZeroDivisionError" in statuses["bench z greedy"][1]
    assert statuses["tests"] == ("skipped", "2 skipped in 1s") and statuses["build y"] == ("ok", "")
    assert [bool(step["data"]) for step in report["steps"]] == [False, False, True, True, False, False]
    assert report["gpu"] == GPU and report["versions"] == {"torch": "2"}
    text = (tmp_path / "out/report.md").read_text()
    assert "| name | A \\| GPU |" in text and "| ar | - | 1.50 | - | - |" in text
    assert "VERDICT: wrong (build x failed: [one] / two, and 1 more)" in done.output
    for words in ("A | GPU", "build x failed", "[one] / two"):
        assert words in done.output


def test_only_some_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = [Step(name, python("pass")) for name in ("export", "bench x", "bench y", "peers")]
    done = run(monkeypatch, given, tmp_path / "bundle", tmp_path / "out", "--only", "bench", "--only", "peers")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert done.exit_code == 0 and [step["name"] for step in report["steps"]] == ["bench x", "bench y", "peers"]


def test_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = [Step("peers", python("raise SystemExit('was run')")), Step("bench x", blocked="no x")]
    results = run_steps(given, 10, tmp_path / "log", lambda _: None)
    assert [r.status for r in results] == ["skipped", "skipped"] and results[1].reason == "no x"
    assert results[0].reason == "it needs 45 s, and 10 s of the budget are left"
    monkeypatch.setitem(running.SECONDS, "bench", (0, 1))
    slow = Step("bench x", python("import time; time.sleep(60)"))
    for budget, expected in ((10, ("failed", "its limit")), (0.5, ("skipped", "the end of the budget"))):
        (result,) = run_steps([slow], budget, tmp_path / "log", lambda _: None)
        assert result.status == expected[0] and result.reason.endswith(expected[1]) and result.seconds < 30
    assert verdict(Found(GPU), [result])[0] == "nothing ran"


def test_ctrl_c_while_a_step_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            begun.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(running.subprocess, "Popen", Interrupted)
    slow = Step("bench x", python("import time; time.sleep(60)"))
    with pytest.raises(KeyboardInterrupt):
        run_steps([slow], 60, tmp_path / "log", lambda _: None)
    assert begun[0].poll() == -signal.SIGTERM


def test_ctrl_c_keeps_what_is_written(tmp_path: Path):
    (tmp_path / FILE_NAME).touch()
    driver = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import gpu_check as g\n"
        "from gpu_checks.machine import Found\n"
        "from gpu_checks.steps import Step\n"
        "g.look = lambda: Found({'name': 'GPU'})\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "g.plan_steps = lambda *_: [Step('peers', (sys.executable, '-c', 'pass')),\n"
        "                           Step('bench x', (sys.executable, '-c', code))]\n"
        "g.main()\n"
    )
    log, command = tmp_path / "out/gpu_check.log", [sys.executable, "-c", driver, tmp_path, "-o", tmp_path / "out"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running_check:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (log.exists() and log.read_text().splitlines()[-1].isdigit()):
            time.sleep(0.05)
        running_check.send_signal(signal.SIGINT)
        errors = running_check.communicate(timeout=60)[1]
    assert running_check.returncode == 130 and errors.endswith("interrupted\n")
    assert not Path(f"/proc/{log.read_text().splitlines()[-1]}").exists()
    assert [step["name"] for step in json.loads((tmp_path / "out/report.json").read_text())["steps"]] == ["peers"]
