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

import click.testing
import pytest
from click.testing import CliRunner
from fake_gpu import FakeCuda
from safetensors.numpy import load_file

from pass_runtime.backends.cuda import DeviceInfo, find_device, why_no_device
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.errors import PassError

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests/cli")]

import gpu_check  # noqa: E402
import gpu_report  # noqa: E402
import gpu_steps  # noqa: E402
from gpu_check import OUTPUT_PLACEHOLDER, STEP_SECONDS, Step, plan_steps, run_steps  # noqa: E402
from gpu_report import Machine, attention_advice, tables, verdict  # noqa: E402
from pass_run import assert_refused  # noqa: E402

GPU = {"name": "A | GPU", "memory.total": "81559 MiB", "compute_cap": "9.0"}
GIB = 1 << 30
LAYERS_RAN = (("layers cuda", "ok"), ("attention cuda", "failed"))
WROTE = (
    'import sys; open(sys.argv[1], "w").write(\'{"plans": [{"plan": "ar", "ratio": 1.5}], '
    '"uncaptured": %s}\')'
)


def python(code: str) -> tuple[str, ...]:
    return sys.executable, "-c", code


def run(
    monkeypatch: pytest.MonkeyPatch, given: list[Step], bundle: Path, output: Path, *flags: str
) -> click.testing.Result:
    """The command on a machine with a GPU, with these steps in place of its own."""
    bundle.mkdir()
    (bundle / FILE_NAME).touch()
    monkeypatch.setattr(
        gpu_check, "inspect_machine", lambda: Machine(GPU, "sm90", 80.0, {"torch": "2"})
    )
    monkeypatch.setattr(gpu_check, "plan_steps", lambda *_: given)
    return CliRunner().invoke(gpu_check.main, [str(bundle), "-o", str(output), *flags])


@pytest.mark.skipif(
    find_device() is not None or shutil.which("nvidia-smi") is not None, reason="there is a GPU"
)
def test_without_a_gpu(tmp_path: Path):
    """Nothing ran, and the report says so, and what would have been run."""
    command = [ROOT / "scripts/gpu_check.sh", "-o", tmp_path / "out"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1].startswith(
        "VERDICT: nothing ran (no NVIDIA GPU: nvidia-smi"
    )
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["verdict"] == "nothing ran"
    assert {(step["status"], step["reason"]) for step in report["steps"]} == {
        ("skipped", "no NVIDIA GPU")
    }
    assert {"device", "tiny cuda", "layers tensorrt", "attention cuda"} <= {
        step["name"] for step in report["steps"]
    }
    assert (
        (tmp_path / "out/report.md")
        .read_text()
        .startswith("**VERDICT: nothing ran** (no NVIDIA GPU")
    )


def test_a_bundle_that_is_none_is_refused(tmp_path: Path):
    command = [ROOT / "scripts/gpu_check.sh", tmp_path / "nothing", "-o", tmp_path / "out"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "is not a bundle" in assert_refused(done.returncode, done.stdout, done.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("status", "uncaptured", "expected", "code"),
    [
        ("ok", {}, "works", 0),
        ("ok", {"tail.onnx": "capture refused"}, "works but not captured", 4),
        ("failed", {"tail.onnx": "capture refused"}, "wrong", 1),
        ("skipped", {}, "nothing ran", 3),
    ],
)
def test_the_verdict(
    status: str, uncaptured: dict[str, str], expected: str, code: int, tmp_path: Path, monkeypatch
):
    end = {"ok": "", "failed": "; sys.exit('broken')", "skipped": ""}[status]
    blocked = "no library" if status == "skipped" else None
    given = [
        Step("export", python("pass")),
        Step(
            "bench x",
            (*python(WROTE % json.dumps(uncaptured).replace("'", "") + end), OUTPUT_PLACEHOLDER),
            blocked,
        ),
    ]
    done = run(monkeypatch, given, tmp_path / "bundle", tmp_path / "out")
    assert done.exit_code == code
    said = done.output.splitlines()[-1]
    assert said.startswith(f"VERDICT: {expected} (")
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["verdict"] == expected and report["why"] in said
    if uncaptured and status == "ok":
        assert "capture refused" in said


@pytest.mark.parametrize(
    ("target", "libraries"), [("sm90", ["tensorrt"]), ("sm89", ["tensorrt", "tensorrt-rtx"])]
)
def test_a_library_without_the_target_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, libraries: list[str]
):
    monkeypatch.setattr(gpu_report, "nvidia_smi", lambda: GPU)
    monkeypatch.setattr(gpu_report, "find_device", lambda: DeviceInfo("GPU", target, GIB, 80 * GIB))
    monkeypatch.setattr(gpu_report, "why_not", lambda _: "")
    monkeypatch.setattr(gpu_check, "PROGRAM", Path(sys.executable))
    found = {step.name: step for step in plan_steps(gpu_report.find_machine(), tmp_path, 8, 4)}
    kinds = (
        "tiny {}",
        "layers {}",
        "build {}",
        "rows {}",
        "bench {} greedy",
        "bench {} sampled",
        "cpp {}",
    )
    for name in LIBRARIES:
        for kind in kinds:
            step = kind.format(name)
            if name in libraries:
                assert not found[step].blocked
            else:
                assert f"tensorrt-rtx has no target {target}; it has sm75, " in found[step].blocked
                assert "refuses these GPUs (Hopper)" in found[step].blocked
    assert found["build tensorrt"].after == ("export",) and not found["export"].blocked
    assert found["bench tensorrt greedy"].after == ("build tensorrt",)
    assert not found["attention cuda"].blocked and found["attention cuda"].after == ("layers cuda",)


def test_what_tells_most_comes_first(tmp_path: Path):
    names = [
        step.name.split()[0] for step in plan_steps(Machine(GPU, "sm89", 80.0), tmp_path, 8, 4)
    ]
    order = [
        "device",
        "tiny",
        "layers",
        "export",
        "build",
        "rows",
        "kernels",
        "batch",
        "bench",
        "cpp",
        "genai",
        "tests",
        "attention",
    ]
    firsts = list(dict.fromkeys(names))
    assert sorted(firsts) == sorted(order) and set(firsts) == set(STEP_SECONDS)
    assert firsts == order


@pytest.mark.parametrize(("memory", "blocked"), [(23.6, False), (22.2, False), (16.0, True)])
def test_a_card_of_24_gb_reports_less(memory: float, blocked: bool, tmp_path: Path):
    """It can run all layers of a 7B; a smaller one runs some of them."""
    found = {
        layers: {
            step.name: step
            for step in plan_steps(Machine(GPU, "sm89", memory), tmp_path, 8, layers)
        }
        for layers in (4, 32)
    }
    for name in ("layers cuda", "layers tensorrt", "attention cuda"):
        assert bool(found[32][name].blocked) == blocked and not found[4][name].blocked
        assert "--layers=32" in found[32][name].command


def test_what_is_missing_blocks_its_steps_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / FILE_NAME).touch()
    model = SimpleNamespace(max_capacity=768)
    monkeypatch.setattr(
        gpu_check,
        "read_manifest",
        lambda _: SimpleNamespace(model=model, lookahead=SimpleNamespace(length=3)),
    )
    monkeypatch.setattr(gpu_check, "PROGRAM", tmp_path / "nothing")
    without = plan_steps(Machine(GPU, "sm89", 1.0), tmp_path, 8, 4)
    missing = {"cuda": "no onnxruntime-gpu", "tensorrt": "no TensorRT"}
    found = {s.name: s for s in plan_steps(Machine(GPU, "sm89", 1.0, {}, missing), tmp_path, 8, 4)}
    assert "export" not in found
    assert (
        "run scripts/build_cpp.sh"
        in next(s for s in without if s.name == "cpp tensorrt-rtx").blocked
    )
    assert (
        found["bench cuda greedy"].blocked
        == found["attention cuda"].blocked
        == "no onnxruntime-gpu"
    )
    assert found["layers tensorrt"].blocked == "no TensorRT"
    assert found["layers tensorrt-rtx"].blocked == "4 layers need 3 GiB, this GPU has 1.0"
    assert "--rows 1,4,16" in " ".join(found["rows tensorrt"].command)
    build = found["build tensorrt-rtx"]
    assert not build.blocked and build.command[-2:] == ("--max-seq-len", "768")


@pytest.mark.parametrize(
    ("code", "hint"), [(35, "older than the CUDA library"), (100, "visible to nvidia-smi")]
)
def test_why_cuda_sees_no_gpu(code: int, hint: str, monkeypatch: pytest.MonkeyPatch):
    """An old driver is not a missing package."""
    api = SimpleNamespace(cudaGetDeviceCount=lambda: (code, 0))
    monkeypatch.setattr(gpu_report, "nvidia_smi", lambda: GPU)
    monkeypatch.setattr(gpu_report, "find_device", lambda: find_device(api))
    monkeypatch.setattr(gpu_report, "why_no_device", lambda: why_no_device(api))
    missing = gpu_report.find_machine().missing
    assert f"CUDA error {code}" in missing["cuda-python"] and hint in missing["cuda-python"]
    assert missing["tensorrt"] == missing["cuda-python"]


def test_the_device_is_checked():
    gpu = FakeCuda(target=(8, 9))
    report = gpu_steps.check_device(gpu)
    found = {each["check"]: each["result"] for each in report["checks"]}
    assert (
        found["copy"] == "unchanged"
        and found["capture"] == "replayed twice"
        and not report["uncaptured"]
    )
    assert not gpu.blocks and not gpu.streams and not gpu.graphs


def test_a_device_that_refuses_captures(monkeypatch: pytest.MonkeyPatch):
    gpu = FakeCuda(target=(8, 9))
    monkeypatch.setattr(gpu, "cudaStreamBeginCapture", lambda *_: (900,), raising=False)
    report = gpu_steps.check_device(gpu)
    assert "CUDA error 900" in report["uncaptured"]["a copy"]
    assert not gpu.blocks and not gpu.streams


def test_a_device_without_memory():
    gpu = FakeCuda(target=(8, 9), limit=gpu_steps.COPY_BYTES - 1)
    with pytest.raises(PassError, match="the GPU has no 1 MiB left"):
        gpu_steps.check_device(gpu)
    assert not gpu.blocks and not gpu.streams


def test_a_device_that_copies_wrongly(monkeypatch: pytest.MonkeyPatch):
    gpu = FakeCuda(target=(8, 9))
    monkeypatch.setattr(gpu_steps.Cuda, "download", lambda _self, array, _address: array.fill(1))
    with pytest.raises(PassError, match="a copy to the GPU and back changed"):
        gpu_steps.check_device(gpu)


@pytest.mark.slow
def test_the_tiny_model(tmp_path: Path):
    """On the CPU, against itself: it is made, and every plan writes the same."""
    command = [
        sys.executable,
        ROOT / "scripts/gpu_steps.py",
        "tiny",
        "--device",
        "cpu",
        "-o",
        tmp_path / "out.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert [each["same_tokens"] for each in report["plans"]] == [True] * 4 and report[
        "uncaptured"
    ] == {}


@pytest.mark.slow
def test_times_of_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model is made, with either attention; its passes are timed, and it is not made again.
    What counts as read are the parameters of a layer, without its norms, with K and V of as many
    tokens."""
    monkeypatch.setattr(
        gpu_steps,
        "SIZES_OF_7B",
        {name: size for name, size in gpu_steps.TINY_SIZES.items() if name != "layers"},
    )
    reports = []
    for number, kind in enumerate(("attention", "group-query", "attention")):
        output, flags = (
            tmp_path / f"{number}.json",
            ["--rows=1", "--rows=5", "--capacity=64", "--capacity=128"],
        )
        words = [
            "layers",
            "--device=cpu",
            "--layers=1",
            f"--keep={tmp_path}",
            f"--cuda-attention={kind}",
            *flags,
        ]
        done = CliRunner().invoke(gpu_steps.main, [*words, "-o", str(output)])
        assert done.exit_code == 0, done.output
        reports.append(json.loads(output.read_text()))
        monkeypatch.setattr(
            gpu_steps.subprocess, "run", lambda *_, **__: None
        )  # the model is there
    (place,) = {path.parent for path in tmp_path.glob("*/model")}
    assert sorted(path.name for path in place.iterdir()) == ["attention", "group-query", "model"]
    for report in reports:
        cells = [(cell["rows"], cell["capacity"]) for cell in report["cells"]]
        assert list(dict.fromkeys(cells)) == [(1, 64), (5, 64), (1, 128), (5, 128)]
        assert (
            all(cell["milliseconds"] > 0 for cell in report["cells"]) and report["uncaptured"] == {}
        )
    assert reports[0]["logits"] == reports[1]["logits"] == reports[2]["logits"] != []
    parameters = load_file(place / "model/layer-0.safetensors")
    read = sum(2 * weight.size for weight in parameters.values() if weight.ndim == 2)
    assert (
        reports[0]["cells"][0]["layer_bytes"] == read + 2 * 2 * 2 * 32 * 64
    )  # K and V of two heads of 32
    assert reports[0]["cells"][0]["other_bytes"] == 2 * 128 * 1024


def test_times_of_layers_beside_the_bandwidth():
    """Copies take half as long as this pass, and a pass over all layers takes as many times as long
    as it reads."""
    cell = {"window": "ar", "rows": 1, "ratio": 1.0, "capacity": 512, "milliseconds": 2.0}
    cell |= {"layers": 4, "layer_bytes": 200, "other_bytes": 200}
    results = [
        gpu_report.Result("device", "ok", data={"checks": [], "copy_bandwidth": 1e6}),
        gpu_report.Result("layers cuda", "ok", data={"cells": [cell]}),
    ]
    (row,) = tables(Machine(GPU), results)["layers cuda"]
    assert row["of the bound"] == "0.50" and row["7B, extrapolated"] == f"{2 * 6600 / 1000:.2f}"
    (row,) = tables(Machine(GPU), results[1:])["layers cuda"]
    assert row["of the bound"] == "-"


def test_which_attention_to_use():
    plain = {"logits": [1.0, -4.0], "cells": [{"milliseconds": 2.0}, {"milliseconds": 4.0}]}

    def advice(logits: list[float], factor: float, status: str = "ok") -> str:
        cells = [{"milliseconds": factor * cell["milliseconds"]} for cell in plain["cells"]]
        other = {"logits": logits, "cells": cells}
        return attention_advice(
            gpu_report.Result("attention cuda", status, 1, "no kernel", other), plain
        )

    assert (
        advice([1.0, -4.1], 0.8)
        == "leave out --cuda-attention attention: passes take 0.80 times as long without it"
    )
    assert advice([1.0, -4.0], 0.99).startswith("export with")
    assert "logits differ by up to 0.05 of" in advice([1.2, -4.0], 0.8)
    assert advice([], 1, "failed") == "export with --cuda-attention attention: no kernel"
    failed = [gpu_report.Result(name, status, 1, "no kernel") for name, status in LAYERS_RAN]
    assert verdict(Machine(GPU), failed) == ("works", "1 steps on the GPU")


def test_times_of_windows_are_shown():
    row = {
        "rows": 9,
        "window": "prefill-9",
        "lookahead_rows": 0,
        "trunk_milliseconds": 1.5,
        "tail_milliseconds": None,
    }
    (shown,) = tables(Machine(GPU), [gpu_report.Result("rows cuda", "ok", 0, "", {"rows": [row]})])[
        "rows cuda"
    ]
    assert [*shown.values()] == ["prefill-9", "9", "-", "1.50", "-"]


def test_a_failed_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its figures so far and its last words are kept, what builds on it is skipped, and the rest is
    run."""
    broken = python("import sys; print('[one]\\ntwo', file=sys.stderr); sys.exit(3)")
    given = [
        Step("build x", broken),
        Step("bench x greedy", python("1 / 0"), after=("build x",)),
        Step("bench y greedy", (*python(WROTE % "{}"), OUTPUT_PLACEHOLDER)),
        Step("bench z greedy", (*python(f"{WROTE % '{}'}; 1 / 0"), OUTPUT_PLACEHOLDER)),
        Step("tests", python("print('2 skipped in 1s')")),
        Step(
            "build y", python("import sys; sys.exit('error: B has engines y already; use --force')")
        ),
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
    assert (
        statuses["bench z greedy"][0] == "failed"
        and "ZeroDivisionError" in statuses["bench z greedy"][1]
    )
    assert statuses["tests"] == ("skipped", "2 skipped in 1s") and statuses["build y"] == ("ok", "")
    assert [bool(step["data"]) for step in report["steps"]] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert report["gpu"] == GPU and report["versions"] == {"torch": "2"}
    text = (tmp_path / "out/report.md").read_text()
    assert "| name | A \\| GPU |" in text and "| ar | - | 1.50 | - | - |" in text
    assert "VERDICT: wrong (build x failed: [one] / two, and 1 more)" in done.output
    for words in ("A \\| GPU", "build x failed", "[one] / two"):
        assert words in done.output


def test_only_some_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = [Step(name, python("pass")) for name in ("export", "bench x", "bench y", "cpp x")]
    done = run(
        monkeypatch,
        given,
        tmp_path / "bundle",
        tmp_path / "out",
        "--only",
        "bench",
        "--only",
        "cpp",
    )
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert done.exit_code == 0 and [step["name"] for step in report["steps"]] == [
        "bench x",
        "bench y",
        "cpp x",
    ]


def test_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = [Step("export", python("raise SystemExit('was run')")), Step("bench x", blocked="no x")]
    results = run_steps(given, 10, tmp_path / "log", lambda _: None)
    assert [r.status for r in results] == ["skipped", "skipped"] and results[1].reason == "no x"
    assert results[0].reason == "it needs 40 s, and 10 s of the budget are left"
    monkeypatch.setitem(STEP_SECONDS, "bench", (0, 1))
    slow = Step("bench x", python("import time; time.sleep(60)"))
    for budget, expected in (
        (10, ("failed", "its limit")),
        (0.5, ("skipped", "the end of the budget")),
    ):
        (result,) = run_steps([slow], budget, tmp_path / "log", lambda _: None)
        assert (
            result.status == expected[0]
            and result.reason.endswith(expected[1])
            and result.seconds < 30
        )
    assert verdict(Machine(GPU), [result])[0] == "nothing ran"


def test_ctrl_c_while_a_step_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            begun.append(self)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Interrupted)
    slow = Step("bench x", python("import time; time.sleep(60)"))
    with pytest.raises(KeyboardInterrupt):
        run_steps([slow], 60, tmp_path / "log", lambda _: None)
    assert begun[0].poll() == -signal.SIGTERM


def test_ctrl_c_keeps_what_is_written(tmp_path: Path):
    (tmp_path / FILE_NAME).touch()
    driver = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "import gpu_check as g\n"
        "from gpu_check import Machine, Step\n"
        "g.inspect_machine = lambda: Machine({'name': 'GPU'})\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        "g.plan_steps = lambda *_: [Step('bench y', (sys.executable, '-c', 'pass')),\n"
        "                           Step('bench x', (sys.executable, '-c', code))]\n"
        "g.main()\n"
    )
    log, command = (
        tmp_path / "out/gpu_check.log",
        [sys.executable, "-c", driver, tmp_path, "-o", tmp_path / "out"],
    )
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running_check:
        until = time.monotonic() + 60
        while time.monotonic() < until and not (
            log.exists() and log.read_text().splitlines()[-1].isdigit()
        ):
            time.sleep(0.05)
        running_check.send_signal(signal.SIGINT)
        errors = running_check.communicate(timeout=60)[1]
    assert running_check.returncode == 130 and errors.endswith("interrupted\n")
    assert not Path(f"/proc/{log.read_text().splitlines()[-1]}").exists()
    assert [
        step["name"] for step in json.loads((tmp_path / "out/report.json").read_text())["steps"]
    ] == ["bench y"]
